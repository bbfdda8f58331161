"""The options of `bifolio serve` with several models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from bifolio.cli import commands
from bifolio.cli.serve_checks import changed, written

if TYPE_CHECKING:
    from bifolio.cli.options import BatchEngine
    from bifolio.cli.serve import ServerOptions
    from bifolio.serve.several.settings import ModelSource, SeveralModels

# Options of the server that one engine behind it needs.
OF_ONE_ENGINE = ("name", "engine", "engine_secret_file", "replicas", "prefill_replicas", "front_ends", "role",
                 "kv_events", "metrics_compat")  # fmt: skip
BUDGET = 0.8  # of the free memory


@dataclass(frozen=True)
class SeveralOptions:
    """Models that share one server and a budget of memory."""

    HEADING: ClassVar[str] = "several models"

    models_dir: Annotated[
        Path | None, commands.option("--models-dir", help="Serve every model in this folder, on demand.")
    ] = None
    models_preset: Annotated[
        Path | None, commands.option("--models-preset", help="INI file with a section of options for each model.")
    ] = None
    models_memory: Annotated[
        str | None,
        commands.option(
            "--models-memory", help="The most memory of all loaded models; default: 80 % of the free memory."
        ),
    ] = None
    models_sleep: Annotated[
        str | None,
        commands.option(
            "--models-sleep", help="Host memory for weights of evicted models, which sleep; default: they end."
        ),
    ] = None
    keep: Annotated[
        list[str] | None, commands.option("--keep", help="Name of a model that stays loaded; repeatable.")
    ] = None
    keep_alive: Annotated[
        str | None,
        commands.option("--keep-alive", help="Unload a model this long after its last request, such as 5m."),
    ] = None
    models_wait: Annotated[
        float,
        commands.option("--models-wait", help="Seconds that a request waits for its model to load.", advanced=True),
    ] = 120.0

    def settings(self, models: Sequence[str], server: ServerOptions, engine: BatchEngine) -> SeveralModels | None:
        """The models and their limits; None for a server of one model."""
        from bifolio.errors import ConfigError

        if len(models) < 2 and self.models_dir is None and self.models_preset is None:
            for name in changed(self):
                raise ConfigError(
                    f"{written(self, name)} is for several models: pass --model twice or more, --models-dir or "
                    "--models-preset"
                )
            return None
        from bifolio.engine.host_memory import free_memory
        from bifolio.engine.memory import read_size
        from bifolio.kernels.select import resolve_device
        from bifolio.serve.several.application import seconds_of
        from bifolio.serve.several.settings import CACHE_BYTES, SeveralModels, find_models

        for name in changed(server):
            if name in OF_ONE_ENGINE:
                raise ConfigError(f"{written(server, name)} cannot be combined with several models: leave it out")
        if engine.mmproj is not None:
            raise ConfigError("--mmproj is for one model: put the file of each tower beside its model")
        cache_bytes = read_size(engine.memory) or CACHE_BYTES
        device = resolve_device(engine.device)
        on_device = device.startswith("cuda")
        free = free_memory_of(device) if on_device and self.models_memory is None else free_memory()
        budget = read_size(self.models_memory) or int(BUDGET * free)
        presets, kept = self._presets(engine, cache_bytes, on_device)
        return SeveralModels(
            find_models(models, self.models_dir, cache_bytes, presets, on_device=on_device),
            budget,
            cache_bytes,
            frozenset([*(self.keep or ()), *kept]),
            None if self.keep_alive is None else seconds_of(self.keep_alive),
            self.models_wait,
            read_size(self.models_sleep) or 0,
        )

    def _presets(self, engine: BatchEngine, cache_bytes: int, on_device: bool) -> tuple[list[ModelSource], list[str]]:
        """The models of the preset file, and the names of those that stay loaded."""
        from bifolio.cli.presets import read_presets
        from bifolio.engine.memory import read_size
        from bifolio.serve.several.settings import model_source

        found: list[ModelSource] = []
        if self.models_preset is None:
            return found, []
        presets = read_presets(self.models_preset, engine)
        for preset in presets:
            options = preset.engine.for_llm()
            if options["speculative"] is not None:
                options["speculative"] = asdict(options["speculative"])
            options["memory"] = read_size(preset.engine.memory) or cache_bytes
            source = model_source(preset.name, preset.reference, options["memory"], options, on_device=on_device)
            found.append(source)
        return found, [preset.name for preset in presets if preset.keep]


def free_memory_of(device: str) -> int:
    """Free bytes of a GPU, asked in a process of its own: a context in this one would take some of them."""
    import subprocess
    import sys

    from bifolio.errors import ConfigError

    code = f"import torch; print(torch.cuda.mem_get_info({device!r})[0])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"the free memory of {device} cannot be read: pass --models-memory")
    return int(done.stdout)
