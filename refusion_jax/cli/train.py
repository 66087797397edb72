"""The command line of training: settings from a file, changed by options."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

from tyro.conf import arg

from refusion_jax.cli.options import UserError, parse, read_settings
from refusion_jax.cli.process import company, devices, fail, keep_compiled_programs, warnings_in_one_line
from refusion_jax.distributed import DistributedConfig
from refusion_jax.training.config import DataConfig, LoopConfig, StartConfig, TrainConfig

STOPPED = 75
"""Exit code when SIGTERM stopped the training and a checkpoint is there (EX_TEMPFAIL): run the same command again."""

NOTHING = TrainConfig("", StartConfig(checkpoint=""), DataConfig(), LoopConfig(epochs=1.0))


@dataclasses.dataclass(frozen=True)
class Options:
    """Train a ReFusion model, or go on training it.

    Settings come from --config, a Python file whose get_config() returns a TrainConfig, and the options below change
    them. In a --run directory that holds a run already, training goes on from its latest checkpoint; it is refused if
    the settings are others than those it began with.

    A run directory holds
      metrics.jsonl, tensorboard/  what was measured
      checkpoints/                 the latest checkpoints, and the best
      model/                       the trained model in Hugging Face layout, when training is over
      run.json, config.json, ...   what the run is

    decode.py takes the directory as --model, also while training goes on.

    Exit code: 0; 2 for what you can mend, which is said in one sentence; 75 when SIGTERM stopped it and 130 when
    Ctrl-C did: a checkpoint is there, and the same command goes on; 1 if training failed.

    Exit code of --aot: 0 if it fits, 1 if it does not.
    """

    config: Annotated[str | None, arg(metavar="FILE.py")] = None
    """Settings to start from."""
    aot: Annotated[str | None, arg(metavar="TPU:SHAPE", help_behavior_hint="")] = None
    """Train nothing: compile a step for these chips, such as v5e:16x16, without having them, and say what it takes.
    Where no mesh is given, it is fsdp over all of them."""
    settings: Annotated[TrainConfig, arg(name="")] = NOTHING
    processes: Annotated[DistributedConfig, arg(name="")] = DistributedConfig()


@dataclasses.dataclass(frozen=True)
class _File:
    config: str | None = None


def main(args: Sequence[str] | None = None, config: str | None = None) -> int:
    """Train as ``args`` (of the process, if None) ask for. Returns the exit code.

    ``config`` names the settings where ``args`` name none.
    """
    of_process = args is None
    args = sys.argv[1:] if args is None else args
    try:
        with warnings_in_one_line(), company():
            return run(args, config)
    except UserError as error:
        print(f"error: {str(error).strip()}", file=sys.stderr)
        return fail(2)
    except (FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return fail(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        if of_process:
            os._exit(130)  # what runs on the device would outlive the interpreter, and crash it
        return 130


def run(args: Sequence[str], config: str | None) -> int:
    """The options first, then the data and the model, then the training."""
    options = parse_options(args, config)
    if options.aot is not None:
        return ahead_of_time(options.settings, options.aot)
    keep_compiled_programs()
    try:
        from refusion_jax.training import loop  # and with it all that training needs
    except ImportError as error:
        raise UserError(f"training needs more packages ({error}): pip install 'refusion-jax[train]'") from error

    try:
        with devices(options.settings.mesh, options.processes):
            loop.train(options.settings)
    except loop.Interrupted as stop:
        print(stop, file=sys.stderr)
        return STOPPED if stop.number == signal.SIGTERM else 130
    except (ValueError, FileNotFoundError, BlockingIOError, ImportError) as error:
        raise UserError(str(error)) from error
    return 0


def ahead_of_time(settings: TrainConfig, topology: str) -> int:
    """What a step takes on the chips of ``topology``. Raises UserError."""
    from refusion_jax import aot

    try:
        return aot.command(aot.training, topology, settings)
    except ImportError as error:
        raise UserError(f"training needs more packages ({error}): pip install 'refusion-jax[train]'") from error
    except (ValueError, FileNotFoundError) as error:
        raise UserError(str(error)) from error


def parse_options(args: Sequence[str], config: str | None) -> Options:
    """The options, with the settings of the file behind them. Raises UserError."""
    chosen = parse(_File, args, _File(config), partial=True).config
    settings = NOTHING if chosen is None else read_settings(chosen, TrainConfig, "--config")
    options = parse(Options, args, Options(chosen, settings=settings))
    settings = options.settings
    needed = {"--run": settings.run, "--model.checkpoint": settings.model.checkpoint, "--data.path": settings.data.path}
    if options.aot is not None:
        del needed["--run"], needed["--data.path"]
    if missing := [name for name, value in needed.items() if value == ""]:
        raise UserError(f"{' and '.join(missing)} missing: give them, or a --config file that has them")
    return options
