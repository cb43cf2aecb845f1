"""The remote variant of a model, behind the same RunInference."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy.typing as npt
from apache_beam.ml.inference.base import PredictionResult
from typing_extensions import Unpack

from luminosity.inference.blocks import Block, join
from luminosity.inference.handler import Handler, HandlerOptions
from luminosity.inference.handlers.http.address import Address
from luminosity.inference.handlers.http.connection import Connection
from luminosity.inference.handlers.http.kserve_client import KServe
from luminosity.inference.handlers.http.openai_client import Chat, Embeddings
from luminosity.inference.handlers.http.protocol import HttpProtocol
from luminosity.inference.handlers.http.remote_model import RemoteModel

__all__ = ["HttpModelHandler", "HttpOptions"]


class HttpOptions(HandlerOptions, total=False):
    """What every kind of HttpModelHandler takes, and HttpModelHandler itself explains."""

    api_key_env: str | None
    api_key_header: str
    headers: Mapping[str, str] | None
    timeout: float
    deadline: float
    concurrency: int
    ca_file: str | None
    max_response_bytes: int


class HttpModelHandler(Handler[Any, PredictionResult, RemoteModel]):
    """Asks a server for predictions. Swap it for a local handler, and nothing else in the pipeline changes.

    ::

        texts | RunInference(HttpModelHandler.embeddings("https://api.example.com", "small", api_key_env="EXAMPLE_KEY"))

    Made by the protocol that the server speaks, so that a name says what comes out: `embeddings`, `chat`, `kserve`; or
    from an HttpProtocol of your own. The address is the server's; paths are the protocol's business.

    Args:
        url: the server, such as "https://api.example.com"; a `/v1` or `/v2` at its end does no harm.
        protocol: what to say to it.
        api_key_env: the environment variable that holds the key, read on the worker. The key is in no pickle, message
            or log.
        api_key_header: the header that carries it; a bearer token goes into `Authorization`.
        headers: further ones, none of them secret.
        timeout: seconds for one try of a request.
        deadline: seconds for all tries of a request together.
        concurrency: the most requests at once in each process. How many there are is found by trying.
        ca_file: a file of certificates to trust in place of the system's.
        max_response_bytes: the largest answer that is read.
        options: Beam's own: `max_batch_size`, `max_batch_weight`, ...
    """

    device = "remote"
    """Its requests and the batches of local models do not wait for each other."""

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
        **options: Unpack[HandlerOptions],
    ) -> None:
        if protocol.max_batch_size is not None:
            options.setdefault("max_batch_size", protocol.max_batch_size)
        super().__init__(**options)
        if api_key_env is not None and api_key_env in options.get("env_vars", {}):
            raise ValueError(f"found {api_key_env} in env_vars, which travel with the pipeline; set it on the workers")
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
        self._said: str | None = None
        """What the server calls its model."""
        self.concurrency = concurrency
        self.self_batching = protocol.one_by_one
        self.output_type = protocol.output_type

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
        """Texts to float32 vectors, from a server with OpenAI's `/v1/embeddings`.

        `parameters` go into every request, such as `{"dimensions": 256}`; RunInference's `inference_args`, too.
        """
        return cls(url, Embeddings(model, parameters, encoding_format), **options)

    @classmethod
    def chat(
        cls, url: str, model: str, *, parameters: Mapping[str, Any] | None = None, **options: Unpack[HttpOptions]
    ) -> HttpModelHandler:
        """Messages, or lists of them, to the text of the answer, from a server with OpenAI's `/v1/chat/completions`.

        `parameters` go into every request, such as `{"temperature": 0}`; RunInference's `inference_args`, too.
        """
        return cls(url, Chat(model, parameters), **options)

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
        """Arrays, numbers or texts, or dicts of them by input, to rows of the outputs: Triton, KServe, OpenVINO.

        `outputs` names those to ask for, where that is not all; `parameters` go into every request.
        """
        return cls(url, KServe(model, version, outputs, parameters), **options)

    @property
    def model_id(self) -> str | None:
        """What the server calls the model, once it has said so."""
        return self._said or self._protocol.model

    def update_model_path(self, model_path: str | None = None) -> None:
        """Another model of the same server."""
        if model_path:
            self._protocol = copy.copy(self._protocol)
            self._protocol.model = model_path
            self._said = None

    def validate_inference_args(self, inference_args: dict[str, Any] | None) -> None:
        self._protocol.check_arguments(inference_args or {})

    def load_model(self) -> RemoteModel:
        return RemoteModel(self._connection, self._protocol)

    def memory(self, model: RemoteModel) -> int:
        return 0

    def prepare(self, block: Block) -> Block:
        return self._protocol.prepare(block)

    def cost(self, prepared: Block) -> npt.NDArray[Any]:
        return self._protocol.cost(prepared)

    def predict(self, model: RemoteModel, batch: Block, inference_args: dict[str, Any] | None = None) -> Block:
        """A request; where each example is one, and a runner gives several, as many at once as allowed."""
        arguments = inference_args or {}
        if len(batch) > 1 and self._protocol.one_by_one:
            with ThreadPoolExecutor(min(len(batch), self.concurrency)) as threads:
                answers = list(threads.map(lambda example: model.answer([example], arguments), batch))
        else:
            answers = [model.answer(batch, arguments)]
        said = answers[-1].model_id
        self._said = said if isinstance(said, str) and said else self._said
        return join([answer.values for answer in answers])

    def get_metrics_namespace(self) -> str:
        return "BeamML_HTTP"
