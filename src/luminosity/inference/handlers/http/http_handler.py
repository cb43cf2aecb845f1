"""``HttpModelHandler``: predictions of a model server, behind the same RunInference as a local model."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, cast

import numpy.typing as npt
from apache_beam.ml.inference.base import PredictionResult
from typing_extensions import Unpack

from luminosity.errors import Fix, InvalidArgument
from luminosity.inference.answer_cache import CacheSettings
from luminosity.inference.answer_format import AnswerFormat
from luminosity.inference.blocks import Block, join
from luminosity.inference.handler import Handler, HandlerOptions
from luminosity.inference.handlers.http.batches.answers import SHARE_OF_PRICE, check_window, values_of
from luminosity.inference.handlers.http.batches.journal import folder_of_checkpoint
from luminosity.inference.handlers.http.batches.model import MOST_REQUESTS, BatchAnswer, BatchModel
from luminosity.inference.handlers.http.connection import Address, Connection
from luminosity.inference.handlers.http.hedging import check_hedge
from luminosity.inference.handlers.http.kserve import KServe
from luminosity.inference.handlers.http.limits import RequestLimits
from luminosity.inference.handlers.http.openai_client import Chat, Embeddings
from luminosity.inference.handlers.http.protocol import HttpProtocol
from luminosity.inference.handlers.http.remote_model import RemoteModel
from luminosity.inference.handlers.http.usage import GivenPrices, Prices

__all__ = ["HttpModelHandler"]


class HttpOptions(HandlerOptions, total=False):
    """The keyword arguments of every kind of ``HttpModelHandler``; its docstring explains them."""

    api_key_env: str | None
    api_key_header: str
    headers: Mapping[str, str] | None
    timeout: float
    deadline: float
    concurrency: int
    ca_file: str | None
    max_response_bytes: int
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_total_tokens: int | None
    max_cost: float | None
    prices: GivenPrices
    cache: str | os.PathLike[str] | None
    cache_limit: str | int
    hedge: float | None


class HttpModelHandler(Handler[Any, PredictionResult, RemoteModel]):
    """Gets predictions from a model server. You can swap it for a local handler without other changes to the pipeline.

    Use the class method for the protocol that the server speaks, :meth:`embeddings`, :meth:`chat` or :meth:`kserve`, or
    pass your own ``HttpProtocol``.

    >>> handler = HttpModelHandler.embeddings("https://api.example.com", "small", api_key_env="EXAMPLE_KEY")
    >>> handler.model_id
    'small'

    Args:
        url: the server, such as "https://api.example.com". It may end in ``/v1`` or ``/v2``.
        protocol: makes requests and reads responses.
        api_key_env: the environment variable that holds the key. Workers read it; the key is never in a pickle, message
            or log.
        api_key_header: the header that carries the key. In ``Authorization`` it is sent as a bearer token.
        headers: further headers, which must not be secret.
        timeout: seconds for one attempt of a request.
        deadline: seconds for all attempts of a request together.
        concurrency: the most requests at once in each process. The best number below it is found by trying.
        ca_file: a file of certificates to trust instead of the system's.
        max_response_bytes: a larger response is an error.
        requests_per_minute: the most requests in any window of a minute, of all workers of the run together.
        tokens_per_minute: the most tokens of prompts and answers in any window of a minute, likewise.
        max_total_tokens: the most tokens of the whole run; then rows fail with ``BudgetReached``.
        max_cost: the most that all tokens of the run may cost, in the currency of ``prices``; likewise.
        prices: what a million tokens of prompts and a million new ones cost, ``(2.5, 10)``, or a TOML file with the
            prices of models.
        cache: a folder on each worker's disk that keeps the answers, so that no later run asks for them again.
        cache_limit: how much the folder may hold; then the answers that were not used for longest are removed.
        hedge: seconds without an answer after which a request is sent a second time, once at most; the answer that
            comes first counts, and both are paid for. The default is never.
        options: those of Beam's ``ModelHandler``: ``max_batch_size``, ``max_batch_weight`` and so on.
    """

    device = "remote"
    """Not a device of this machine, so requests and the batches of local models do not wait for each other."""

    def __init__(
        self,
        url: str,
        protocol: HttpProtocol,
        *,
        api_key_env: str | None = None,
        api_key_header: str = "Authorization",
        headers: Mapping[str, str] | None = None,
        timeout: float = 60.0,
        deadline: float = 300.0,
        concurrency: int = 64,
        ca_file: str | None = None,
        max_response_bytes: int = 256_000_000,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        max_total_tokens: int | None = None,
        max_cost: float | None = None,
        prices: GivenPrices = None,
        cache: str | os.PathLike[str] | None = None,
        cache_limit: str | int = "10GB",
        hedge: float | None = None,
        completion_window: str | None = None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        if hedge is not None:
            check_hedge(hedge, timeout, completion_window)
        self._hedge = hedge
        self._window = completion_window
        self._window_s = 0.0
        if completion_window is not None:
            limits = (requests_per_minute, tokens_per_minute)
            self._window_s = check_window(completion_window, protocol, any(each is not None for each in limits))
            most = options.get("max_batch_size") or MOST_REQUESTS
            options["max_batch_size"] = most
            options.setdefault("min_batch_size", most)
        if protocol.max_batch_size is not None:
            options.setdefault("max_batch_size", protocol.max_batch_size)
        super().__init__(**options)
        if api_key_env is not None and api_key_env in options.get("env_vars", {}):
            raise InvalidArgument(
                f"found {api_key_env} in env_vars, which are pickled with the pipeline", fix="set it on the workers"
            )
        self._connection = Connection(
            Address.parse(url),
            api_key_env,
            api_key_header,
            dict(headers or {}),
            timeout,
            deadline,
            concurrency,
            ca_file,
            max_response_bytes,
        )
        self._protocol = protocol
        priced = Prices.of(prices, protocol.model)
        if priced is not None and completion_window is not None:
            priced = priced.scaled(SHARE_OF_PRICE)
        self._limits = RequestLimits(requests_per_minute, tokens_per_minute, max_total_tokens, max_cost, priced)
        self._cache = CacheSettings.of(cache, cache_limit)
        self._cache_limit = cache_limit
        if self._cache is not None:
            protocol.check_cache({})
        self._server_model_id: str | None = None
        """The server's name of the model, once it has sent it."""
        self.concurrency = concurrency
        self.self_batching = protocol.one_by_one and completion_window is None
        self.output_type = protocol.output_type

    @property
    def accelerators(self) -> tuple[str, ...]:
        """None: the server computes."""
        return ()

    @classmethod
    def embeddings(
        cls,
        url: str,
        model: str,
        *,
        parameters: Mapping[str, Any] | None = None,
        encoding_format: Literal["base64", "float"] = "base64",
        **options: Unpack[HttpOptions],
    ) -> HttpModelHandler:
        """Return a handler that turns texts into float32 vectors, for servers with OpenAI's ``/v1/embeddings``.

        Args:
            url: the server.
            model: the name by which the server knows the model.
            parameters: sent with every request, such as ``{"dimensions": 256}``, like ``inference_args``.
            encoding_format: how vectors are sent; "base64" is smaller.
            options: the other arguments of ``HttpModelHandler``.
        """
        return cls(url, Embeddings(model, parameters, encoding_format), **options)

    @classmethod
    def chat(
        cls,
        url: str,
        model: str,
        *,
        parameters: Mapping[str, Any] | None = None,
        allow_incomplete: bool = False,
        stream: bool = False,
        completion_window: str | None = None,
        **options: Unpack[HttpOptions],
    ) -> HttpModelHandler:
        """Return a handler that turns messages, or lists of messages, into the text of the model's response.

        The server has OpenAI's ``/v1/chat/completions``. A text that the server cut at ``max_tokens``, an empty or
        withheld text, and a text that is not the JSON that ``response_format`` asks for raise ``IncompleteAnswer``.

        Args:
            url: the server.
            model: the name by which the server knows the model.
            parameters: sent with every request, such as ``{"temperature": 0}``, like ``inference_args``.
            allow_incomplete: return every text as it came, also if it is cut, empty, or not the requested JSON.
            stream: let the server send each answer token by token, so that the time to the first token is known.
            completion_window: "24h" sends the requests in files to the server's batch API, which answers within this
                time for half the ``prices``. What was sent is found again after a restart, in the folder of ``cache``
                or beside that of ``--checkpoint_dir``. ``max_batch_size`` is the most requests of a file, 10,000.
            options: the other arguments of ``HttpModelHandler``.
        """
        return cls(
            url, Chat(model, parameters, allow_incomplete, stream), completion_window=completion_window, **options
        )

    @classmethod
    def kserve(
        cls,
        url: str,
        model: str,
        *,
        version: str | None = None,
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Any] | None = None,
        **options: Unpack[HttpOptions],
    ) -> HttpModelHandler:
        """Return a handler for servers with KServe's protocol, such as Triton and OpenVINO.

        An example is an array, a number or a text, or a dict of these if the model has several inputs.

        Args:
            url: the server.
            model: the name by which the server knows the model.
            version: the version of the model, or None for the server's choice.
            outputs: the outputs to request, or None for all.
            parameters: sent with every request.
            options: the other arguments of ``HttpModelHandler``.
        """
        return cls(url, KServe(model, version, outputs, parameters), **options)

    @property
    def model_id(self) -> str | None:
        """The server's name of the model, or the name that you gave until the first response."""
        return self._server_model_id or self._protocol.model

    @property
    def answer_arguments(self) -> Mapping[str, Any]:
        """What every request of a chat asks for, such as a temperature."""
        return self._protocol.parameters if isinstance(self._protocol, Chat) else {}

    @property
    def takes_pictures(self) -> bool:
        """Whether a message may have pictures."""
        return isinstance(self._protocol, Chat)

    def with_answer_format(self, answer_format: AnswerFormat) -> HttpModelHandler:
        """Return a copy that asks the server for answers of this format, with ``response_format``.

        A server may not know it: check the answers, as ``Prompt`` does. Raises ``InvalidArgument`` unless this is a
        chat without a ``response_format`` of its own.
        """
        if not isinstance(self._protocol, Chat) or "response_format" in self._protocol.parameters:
            found = "a response_format in parameters" if isinstance(self._protocol, Chat) else str(self)
            raise InvalidArgument(
                f"found {found}, expected HttpModelHandler.chat without one: the answer format sets it"
            )
        other = copy.copy(self)
        other._protocol = self._protocol.with_answer_format(answer_format)
        return other

    def with_cache(self, cache: CacheSettings) -> HttpModelHandler:
        """Return a copy that keeps the server's answers in this cache. Raises ``InvalidArgument`` if it has another."""
        if self._cache is not None:
            raise InvalidArgument(
                f"found two caches, {cache.folder} and that of the handler, {self._cache.folder}",
                fix="leave one of them out",
            )
        self._protocol.check_cache({})
        other = copy.copy(self)
        other._cache = cache
        return other

    def check_files(self) -> None:
        """Raise ``EndpointError`` if the environment variable of the API key is not set in this process."""
        self._connection.key()

    def update_model_path(self, model_path: str | None = None) -> None:
        """Switch to another model of the same server."""
        if model_path:
            self._protocol = copy.copy(self._protocol)
            self._protocol.model = model_path
            self._server_model_id = None

    def is_repeatable(self, inference_args: Mapping[str, Any] | None) -> bool | None:
        """Return False for a chat whose answers are sampled; of other servers nothing is known."""
        protocol = self._protocol
        return False if isinstance(protocol, Chat) and protocol.is_sampled(inference_args or {}) else None

    def validate_inference_args(self, inference_args: dict[str, Any] | None) -> None:
        """Raise if the protocol can't take these ``inference_args``."""
        arguments = inference_args or {}
        self._protocol.check_arguments(arguments)
        if self._cache is not None:
            self._protocol.check_cache(arguments)
        self._limits.check_tokens(self._protocol.counts_tokens, self._protocol.most_new_tokens(arguments))

    def check_run_budget(self, max_cost: float) -> None:
        """Raise ``InvalidArgument`` if the server counts tokens, and their prices are not known."""
        if self._protocol.counts_tokens:
            self._limits.check_run_budget(max_cost, f"{self._connection.address.shown()} {self._protocol.model}")

    def load_model(self) -> Any:
        """Open a client for the server, and ask it about the model if the protocol needs that."""
        if self._window is None:
            return RemoteModel(self._connection, self._protocol, self._limits, self._cache, self._hedge)
        cache = self._cache or CacheSettings.of(folder_of_checkpoint(), self._cache_limit)
        if cache is None:
            raise InvalidArgument(
                "found completion_window= without a folder: a run that starts again would pay for a batch twice",
                fix=Fix("pass cache=FOLDER, or run with --checkpoint_dir", command="add --checkpoint_dir=DIR"),
            )
        remote = RemoteModel(self._connection, self._protocol, self._limits)
        most = self.batch_elements_kwargs().get("max_batch_size") or MOST_REQUESTS
        return BatchModel(remote, cache, self._window, self._window_s, most)

    def memory(self, model: Any) -> int:
        """Return 0: the model is on the server."""
        return 0

    def prepare(self, block: Block) -> Block:
        """Check and convert the examples as the protocol requires."""
        return self._protocol.prepare(block)

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        """Return the protocol's cost of each example."""
        return self._protocol.cost(prepared)

    def predict(self, model: RemoteModel, batch: Block, inference_args: dict[str, Any] | None = None) -> Block:
        """Send one request; or, if each example is one request and there are several, as many at once as allowed."""
        arguments = inference_args or {}
        if len(batch) > 1 and self._protocol.one_by_one:
            with ThreadPoolExecutor(min(len(batch), self.concurrency)) as threads:
                parts = list(threads.map(lambda example: model.predict([example], arguments), batch))
        else:
            parts = [model.predict(batch, arguments)]
        model_id = parts[-1].model_id
        self._server_model_id = model_id if isinstance(model_id, str) and model_id else self._server_model_id
        return join([part.values for part in parts])

    def collect(self, outputs: Any) -> Any:
        """Return the predictions; those of the batch API are read here, and the errors of single ones returned."""
        if not (isinstance(outputs, list) and outputs and isinstance(outputs[0], BatchAnswer)):
            return outputs
        values, model_id = values_of(cast("list[BatchAnswer]", outputs), self._protocol, self._limits.prices)
        self._server_model_id = model_id or self._server_model_id
        return values

    def get_metrics_namespace(self) -> str:
        """Return the namespace for the metrics of model servers."""
        return "BeamML_HTTP"
