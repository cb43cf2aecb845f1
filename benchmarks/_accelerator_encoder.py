"""The packed encoder alone on the device: its speed beside other ways, and its vectors beside those of transformers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from _accelerator_models import be_quiet, is_small, path_of
from _lengths import WORKLOADS
from _measure import Figure, print_figures

from luminosity.inference.handlers.text.embedder import SentenceEmbedder
from luminosity.inference.handlers.text.packed.encoder import Encoder, Rows, has_varlen, pool_rows
from luminosity.inference.handlers.text.packed.packing import Packing, packing_of
from luminosity.inference.handlers.text.pretrained import Pretrained

__all__ = ["bare_rates", "equality", "module"]

_SECONDS = 0.2 if is_small() else 0.7  # to repeat each measurement
_TOKENS = 4_000 if is_small() else 2_000_000  # of a pass
_BUDGETS = (1_024,) if is_small() else (32_768, 131_072)  # tokens of a batch
_TARGETS = {"32 tokens": 319_000, "128 tokens": 97_300, "skewed": 275_300}  # of torch's compiler on the same machine

functional = torch.nn.functional


def device() -> torch.device:
    """The CUDA device, or the CPU without one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def module() -> None:
    """Print rows per second of the encoder alone: ids lie on the device, and vectors stay there."""
    be_quiet()
    begun = time.perf_counter()
    packing = _packing(path_of("small"), torch.bfloat16 if device().type == "cuda" else torch.float32)
    fused = packing.encoder()
    _ = [vectors(fused, batch) for batch in _packed([[5, 6, 7]], 8)]
    _synchronize()
    figures = [Figure("first vectors, kernels compiled if they are not kept (s)", time.perf_counter() - begun)]
    shape, dtype = packing.weights.shape, packing.dtype
    is_free = device().type == "cuda" and has_varlen(shape, dtype)
    plain = Encoder(shape, *packing.weights.load(device(), dtype), pads=not is_free)
    theirs = _transformers_model(path_of("small"), dtype)
    for workload in WORKLOADS:
        ids = _ids_of(workload)
        ours = _best(ids, _packed, fused)
        target = None if is_small() else _TARGETS[workload]
        figures.append(Figure(f"{workload}: packed, {type(fused).__name__} (rows/s)", ours, at_least=target))
        note = "torch's attention" if has_varlen else "padded in attention: torch's needs a CUDA device"
        rate = _best(ids, _packed, plain)
        figures.append(Figure(f"{workload}: packed, plain Encoder", rate, note=f"{note}; ours {ours / rate:.2f} times"))
        rate = _best(ids, _padded, theirs)
        figures.append(Figure(f"{workload}: transformers, padded, sorted", rate, note=f"ours {ours / rate:.2f} times"))
    print_figures(figures)


def bare_rates() -> dict[str, float]:
    """Return rows per second of the packed encoder alone, for each workload."""
    packing = _packing(path_of("small"), torch.bfloat16 if device().type == "cuda" else torch.float32)
    encoder = packing.encoder()
    return {workload: _best(_ids_of(workload), _packed, encoder) for workload in WORKLOADS}


def _ids_of(workload: str) -> list[list[int]]:
    generator = np.random.default_rng(0)
    mean = WORKLOADS[workload](generator, 10_000).mean()
    lengths = WORKLOADS[workload](generator, int(_TOKENS / mean))
    ids = generator.integers(1000, 30_000, size=lengths.sum())
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


def _best(ids: list[list[int]], batches_of: Callable[..., Iterator[Any]], encoder: Any) -> float:
    """Return the rows per second with the best budget."""
    return max(_rate(len(ids), encoder, list(batches_of(ids, budget))) for budget in _BUDGETS)


def _rate(rows: int, encoder: Any, batches: Sequence[Any]) -> float:
    """Return the rows per second of the best pass, after a first that does not count."""

    def run() -> float:
        start_s = time.perf_counter()
        with torch.inference_mode():
            for batch in batches:
                functional.normalize(vectors(encoder, batch), dim=1)
        _synchronize()
        return time.perf_counter() - start_s

    run()
    passes: list[float] = []
    while sum(passes) < _SECONDS:
        passes.append(run())
    return rows / min(passes)


def vectors(encoder: Any, batch: tuple[Any, ...]) -> Any:
    """Return the mean of each row's states, of a packed batch or a padded one."""
    with torch.inference_mode():
        if len(batch) == 3:
            ids, starts, longest = batch
            rows = Rows.of(starts, len(ids), longest)
            states = encoder.states(ids, encoder.positions(ids, rows), rows)
            return pool_rows(states, rows, ["mean"], encoder.mean)
        ids, mask = batch
        states = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        if mask is None:
            return states.mean(1, dtype=torch.float32)
        return (states * mask.unsqueeze(-1)).sum(1, dtype=torch.float32) / mask.sum(1, keepdim=True)


def _packed(ids: list[list[int]], budget: int) -> Iterator[tuple[Any, ...]]:
    """Yield batches of at most so many tokens, in the order of the rows."""
    start = 0
    ends = np.cumsum([len(each) for each in ids])
    while start < len(ids):
        done = 0 if start == 0 else int(ends[start - 1])
        end = max(start + 1, int(np.searchsorted(ends, done + budget, side="right")))
        part = ids[start:end]
        starts = np.concatenate([[0], ends[start:end] - done]).astype(np.int32)
        flat = torch.from_numpy(np.concatenate(part).astype(np.int32)).to(device())
        yield flat, torch.from_numpy(starts).to(device()), max(map(len, part))
        start = end


def _padded(ids: list[list[int]], budget: int) -> Iterator[tuple[Any, ...]]:
    """Yield padded batches, longest first: each as many as fit into the budget when all are padded to the first."""
    ordered = sorted(ids, key=len, reverse=True)
    start = 0
    while start < len(ordered):
        end = start + max(1, budget // len(ordered[start]))
        yield _matrix(ordered[start:end])
        start = end


def _matrix(batch: list[list[int]], pad: int = 0) -> tuple[Any, Any]:
    """Return the ids and, where any are padding, the mask."""
    lengths = np.array([len(ids) for ids in batch])
    mask = np.arange(lengths.max()) < lengths[:, None]
    padded = np.full(mask.shape, pad, dtype=np.int64)
    padded[mask] = np.concatenate(batch)
    found = torch.from_numpy(mask.astype(np.int64)).to(device())
    return torch.from_numpy(padded).to(device()), None if mask.all() else found


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _packing(path: str, dtype: Any) -> Packing:
    found = packing_of(Pretrained(path), device(), dtype)
    if found is None:
        raise ValueError(f"the model of {path} is not packed")
    return found


def _transformers_model(path: str, dtype: Any) -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(path, dtype=dtype).to(device()).eval()


# Whether vectors are those of transformers.

_LONGEST = 64 if is_small() else 512
_LENGTHS = ([1, 2, _LONGEST, 7, 33, 1, 64, 20, 3], [9, 9, 9, 9], [1], [3], [_LONGEST])
"""The rows of each batch: of one token, the longest, all alike, batches of one."""
_MANY_ROWS = 20 if is_small() else 2_000  # of a batch of skewed lengths
_LEAST_COSINES = {"bfloat16": 0.999, "float16": 0.99999}
_MOST_ERROR = 1e-4


def equality() -> None:
    """Print how far the vectors of each family are from those of transformers."""
    be_quiet()
    figures, failures = list[Figure](), list[Exception]()
    for family, config in _families().items():
        try:
            figures += _of_family(family, config)
        except Exception as error:  # the next family is tried
            failures.append(error)
            print(f"FAILED: {family}: {type(error).__name__}: {error}", flush=True)
    try:
        figures += _of_texts()
    except Exception as error:
        failures.append(error)
        print(f"FAILED: texts: {type(error).__name__}: {error}", flush=True)
    print_figures(figures)
    if failures:
        raise RuntimeError(f"{len(failures)} families failed") from failures[0]


def _families() -> dict[str, Any]:
    """Return a configuration of each family, with its real width and few layers."""
    import transformers as library

    width = 96 if is_small() else 768
    inside = 4 * width
    common: dict[str, Any] = {
        "vocab_size": 30_522,
        "hidden_size": width,
        "num_attention_heads": width // 32 if is_small() else 12,
        "num_hidden_layers": 3,
        "intermediate_size": inside,
        "initializer_range": 0.04,  # so that layers change their inputs as those of trained models do
    }
    behind: dict[str, Any] = {**common, "max_position_embeddings": _LONGEST + 2, "pad_token_id": 1}
    small = {**common, "hidden_size": 384 if not is_small() else 96, "intermediate_size": inside // 2}
    return {
        "minilm": library.BertConfig(**small, max_position_embeddings=_LONGEST),
        "bert": library.BertConfig(**common, max_position_embeddings=_LONGEST),
        "distilbert": library.DistilBertConfig(
            vocab_size=30_522, dim=width, n_layers=3, n_heads=common["num_attention_heads"], hidden_dim=inside,
            max_position_embeddings=_LONGEST, initializer_range=0.04,
        ),
        "roberta": library.RobertaConfig(**behind, type_vocab_size=1),
        "xlm-roberta": library.XLMRobertaConfig(**behind, type_vocab_size=1),
        "mpnet": library.MPNetConfig(**behind, bos_token_id=0),
        "modernbert": library.ModernBertConfig(
            **{**common, "num_hidden_layers": 4, "intermediate_size": 3 * width // 2}, local_attention=128,
            max_position_embeddings=_LONGEST, pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2,
            sep_token_id=3,
        ),
    }  # fmt: skip


def _of_family(family: str, config: Any) -> Iterator[Figure]:
    from transformers import AutoModel

    generator = np.random.default_rng(0)
    many = np.clip(generator.lognormal(3.3, 0.8, _MANY_ROWS), 1, _LONGEST).astype(int).tolist()
    batches = [[generator.integers(4, 30_000, length).tolist() for length in lengths] for lengths in (*_LENGTHS, many)]
    pad = config.pad_token_id or 0
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModel.from_config(config).eval().save_pretrained(folder)
        exact = _all_vectors(_transformers_model(folder, torch.float32), batches, pad)
        for name in ("float32", "bfloat16", "float16"):
            dtype, what = getattr(torch, name), f"{family}, {name}"
            if device().type == "cpu" and name != "float32":
                yield Figure(f"{what}: least cosine", None, note="needs a CUDA device")
                continue
            encoder = _packing(folder, dtype).encoder()
            found = _all_vectors(encoder, batches, pad)
            if name == "float32":
                error = float((found - exact).abs().max())
                yield Figure(f"{what}: largest error", error, at_most=_MOST_ERROR, note=type(encoder).__name__)
                continue
            theirs = _all_vectors(_transformers_model(folder, dtype), batches, pad)
            note = (
                f"{type(encoder).__name__}; to float32 ours {_least(found, exact):.6f}, theirs "
                f"{_least(theirs, exact):.6f}"
            )
            yield Figure(f"{what}: least cosine", _least(found, theirs), at_least=_LEAST_COSINES[name], note=note)


def _all_vectors(encoder: Any, batches: list[list[list[int]]], pad: int) -> Any:
    is_packed = isinstance(encoder, Encoder)
    each = (next(_packed(ids, 1 << 30)) if is_packed else _matrix(ids, pad) for ids in batches)
    found = torch.cat([vectors(encoder, batch).float().cpu() for batch in each])
    if not bool(torch.isfinite(found).all()):
        raise ArithmeticError(f"{type(encoder).__name__} gives vectors that are not finite")
    return found


def _least(first: Any, second: Any) -> float:
    return float(functional.cosine_similarity(first.double(), second.double(), dim=1).min())


def _of_texts() -> Iterator[Figure]:
    """Compare the handler's own vectors: of empty texts, one word, many words, and one text at a time."""
    texts = ["", "one", " ".join(["many words"] * _LONGEST), "", "a few words", "123456 and ?!"]
    ours, theirs = (SentenceEmbedder(path_of("small"), device=device().type) for _ in range(2))
    theirs.packs_rows = False

    def embed(handler: Any, model: Any, batch: list[str]) -> Any:
        return torch.stack([torch.from_numpy(each.inference) for each in handler.run_inference(batch, model)])

    model = ours.load_model()
    expected = embed(theirs, theirs.load_model(), texts)
    alone = torch.cat([embed(ours, model, [text]) for text in texts])
    yield Figure("texts, also empty ones: least cosine", _least(embed(ours, model, texts), expected), at_least=0.999)
    yield Figure("texts, batches of one: least cosine", _least(alone, expected), at_least=0.999)
