"""The flags of the runner and of models as views of a pipeline's options. The runner knows both, whatever else runs."""

from __future__ import annotations

import argparse
from typing import ClassVar

from apache_beam.options.pipeline_options import PipelineOptions

from luminosity._shared.flags import MODEL_FLAGS, RUNNER_FLAGS, add_arguments

__all__ = ["LuminosityOptions", "ModelOptions"]


class LuminosityOptions(PipelineOptions):
    """The flags of ``LuminosityRunner``. ``docs/options.md`` lists them.

    >>> options = PipelineOptions(["--cpu_workers=4"]).view_as(LuminosityOptions)
    >>> options.cpu_workers
    '4'
    """

    # The values of flags that a pipeline's own options don't set; the command line of `lum run` changes them.
    defaults: ClassVar[dict[str, str | bool | list[str] | None]] = {flag.name: flag.initial for flag in RUNNER_FLAGS}

    @classmethod
    def _add_argparse_args(cls, parser: argparse.ArgumentParser) -> None:
        # EngineConfig checks the values: its messages say more than argparse's.
        add_arguments(parser, RUNNER_FLAGS, cls.defaults)
        # Set when the pipeline is built: the identity that its steps have, see luminosity/runs/run_ids.py.
        parser.add_argument("--checkpoint_run", help=argparse.SUPPRESS)
        # Set then as well: the identity of the run that --restore_from will restore, or an empty text.
        parser.add_argument("--restored_run", help=argparse.SUPPRESS)


class ModelOptions(PipelineOptions):
    """The flags of models, on any runner. ``docs/options.md`` lists them.

    >>> options = PipelineOptions(["--model_cache=/mnt/models"]).view_as(ModelOptions)
    >>> options.model_cache
    '/mnt/models'
    """

    @classmethod
    def _add_argparse_args(cls, parser: argparse.ArgumentParser) -> None:
        # luminosity.inference.options checks the values: its messages say more than argparse's.
        add_arguments(parser, MODEL_FLAGS)
