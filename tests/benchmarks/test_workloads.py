"""Every workload runs through `LLM` on a tiny model, and workers, the runner and the comparison on processes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import compare, runner
from benchmarks.columns import Column, parse_columns
from benchmarks.compare import Compared, exit_code
from benchmarks.engines import Ask, Done, Opening
from benchmarks.engines.bifolio import Async, Offline
from benchmarks.engines.bifolio_http import Served
from benchmarks.limits import Limits
from benchmarks.models import ModelStore
from benchmarks.processes import ROOT, Setting, command, environment
from benchmarks.results import Results
from benchmarks.rows import Row, select
from benchmarks.runner import Plan, Runner, failures, new_results
from benchmarks.table import table
from benchmarks.workload_list import WORKLOADS
from benchmarks.workloads import Decode, NoiseError, Trial, Workload
from bifolio.errors import ConfigError


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    return ModelStore(tmp_path_factory.mktemp("models"), tiny=True)


@pytest.fixture(scope="module")
def offline(store: ModelStore) -> Offline:
    return Offline(Opening(Path(store.path("llama-1b-lora")), {"max_model_len": 256}))


def is_light(workload: Workload) -> bool:
    return "schema" not in str(workload)


@pytest.mark.parametrize("name", [name for name, workload in WORKLOADS.items() if is_light(workload)])
def test_a_workload_runs(name: str, offline: Offline) -> None:
    value = WORKLOADS[name].tiny().run(Trial(offline, 1))
    assert math.isfinite(value)
    assert value > 0 or WORKLOADS[name].fresh


@pytest.mark.full
def test_a_workload_with_a_schema_runs(offline: Offline) -> None:
    pytest.importorskip("llguidance")
    assert WORKLOADS["grammar16"].tiny().run(Trial(offline, 1)) > 0


def test_requests_of_two_passes_differ_and_those_of_one_seed_do_not(offline: Offline) -> None:
    first, again, other = (Trial(offline, seed).tokens(50) for seed in (1, 1, 2))
    assert first == again != other


def test_decode_counts_the_tokens_after_the_first() -> None:
    class Clocked:
        """Takes a second for a prompt that is not stored, and a millisecond for each token."""

        vocab_size = 100

        def __init__(self) -> None:
            self.now, self.stored = 0.0, set[tuple[int, ...]]()

        def reserve(self, sequences: int, length: int) -> None: ...

        def prepare(self, asks: list[Ask]) -> object:
            def call() -> Done:
                for ask in asks:
                    self.now += 0.0 if tuple(ask.prompt) in self.stored else 1.0
                    self.stored.add(tuple(ask.prompt))
                self.now += 1e-3 * max(ask.max_tokens for ask in asks)
                return Done([[1] * ask.max_tokens for ask in asks])

            return call

    engine = Clocked()
    rate = Decode("", "tok/s", count=4, context=9, new=8).run(Trial(engine, 1, lambda: engine.now))  # type: ignore[arg-type]
    assert rate == pytest.approx(4 / 1e-3)
    assert Decode("", "ms/token", new=8).run(Trial(engine, 1, lambda: engine.now)) == pytest.approx(1.0)  # type: ignore[arg-type]


def test_a_difference_that_noise_turned_around_is_no_figure() -> None:
    class Backwards:
        """Takes a second less for every further call."""

        vocab_size = 100

        def __init__(self, num_wrong: int) -> None:
            self.now, self.calls, self.num_wrong = 0.0, 0, num_wrong

        def reserve(self, sequences: int, length: int) -> None: ...

        def prepare(self, asks: list[Ask]) -> object:
            def call() -> Done:
                self.calls += 1
                is_wrong = self.calls <= 1 + 2 * self.num_wrong
                self.now += 100.0 - self.calls if is_wrong else 1.0 * asks[0].max_tokens
                return Done([[1] * ask.max_tokens for ask in asks])

            return call

    disturbed = Backwards(2)
    rate = Decode("", "tok/s", new=8).run(Trial(disturbed, 1, lambda: disturbed.now))  # type: ignore[arg-type]
    assert rate == pytest.approx(1.0)
    hopeless = Backwards(100)
    with pytest.raises(NoiseError, match="the machine is too busy"):
        Decode("", "tok/s", new=8).run(Trial(hopeless, 1, lambda: hopeless.now))  # type: ignore[arg-type]


@pytest.mark.full
def test_the_async_interface_is_an_engine(store: ModelStore) -> None:
    engine = Async(Opening(Path(store.path("llama-1b")), {"max_model_len": 256}))
    assert WORKLOADS["streams16"].tiny().run(Trial(engine, 1)) > 0
    engine.close()


class StandIn:
    """A worker that answers at once: the n-th figure of a process is n."""

    opened_columns: ClassVar[list[str]] = []

    def __init__(self, column: Column, model: Path | str, setting: Setting) -> None:
        self.column, self._count = column, 0
        self.opened_columns.append(column.name)
        self.failed = "there is no such option" if "no_such_option" in column.name else ""
        source = setting.source or ROOT
        about = {"path": str(source / "src" / "bifolio" / "__init__.py"), "kernels": "native"}
        self.opened = {"error": self.failed} if self.failed else {"seconds": 1.5, "peak": 100.0, "about": about}

    def measure(self, workload: str, seed: int) -> dict[str, Any]:
        self._count += 1
        return {"error": self.failed} if self.failed else {"value": float(self._count), "details": {"seed": seed}}

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    monkeypatch.setattr(runner, "Worker", StandIn)
    monkeypatch.setattr(compare, "Worker", StandIn)
    monkeypatch.setattr(StandIn, "opened_columns", [])
    return StandIn


def run_rows(plan: Plan, store: ModelStore, names: list[str]) -> tuple[Results, list[str]]:
    notes: list[str] = []
    results = new_results("here", {"cpu": "x"}, {}, "run")
    Runner(results, Setting(tiny=True), plan, store, Limits(1e9, 1e9, 1e9), notes.append).run(select(names))
    return results, [" ".join(note.split()[:2]) for note in notes if "FAILED" not in note and note.startswith("llama")]


COLUMNS = parse_columns("bifolio,bifolio[kv_cache_dtype=f16],bifolio[no_such_option=1]")
ROWS = ["llama-1b/single", "llama-1b/top_p256"]
TURN = ("bifolio", "bifolio[kv_cache_dtype=f16]")


def test_engines_of_a_cpu_take_turns_row_by_row(stand_in: type[StandIn], store: ModelStore) -> None:
    results, order = run_rows(Plan(rounds=2, columns=COLUMNS), store, ROWS)
    assert order == [f"{row} {column}" for _ in range(2) for row in ROWS for column in TURN]
    assert stand_in.opened_columns == [column.name for column in COLUMNS]
    row = results.rows[0]
    assert row.columns["bifolio"].passes == [1.0, 3.0]
    assert row.columns["bifolio[no_such_option=1]"].missing == "there is no such option"
    assert len(list(failures(results))) == 2


def test_engines_of_a_gpu_take_turns_process_by_process(stand_in: type[StandIn], store: ModelStore) -> None:
    results, order = run_rows(Plan(rounds=2, passes=2, exclusive=True, columns=COLUMNS[:2]), store, ROWS)
    assert order == [f"{row} {column}" for _ in range(2) for column in TURN for row in ROWS for _ in range(2)]
    assert stand_in.opened_columns == [*TURN, *TURN]
    assert results.rows[0].columns["bifolio"].passes == [1.0, 2.0, 1.0, 2.0]


def test_a_start_is_a_process_of_its_own(stand_in: type[StandIn], store: ModelStore) -> None:
    results, _ = run_rows(Plan(rounds=2, columns=COLUMNS[:1]), store, ["llama-1b/start", "llama-1b/memory"])
    assert [row.columns["bifolio"].passes for row in results.rows] == [[1.5, 1.5], [100.0, 100.0]]
    assert len(stand_in.opened_columns) == 4


@pytest.mark.full
def test_a_process_measures_the_build_that_it_is_told_to(store: ModelStore, tmp_path: Path) -> None:
    results = new_results("here", {"cpu": "x"}, {}, "run")
    columns = parse_columns("bifolio[max_model_len=256],no-engine")
    setting = Setting(tiny=True, threads=1, source=ROOT)
    Runner(results, setting, Plan(1, columns=columns), store, None, lambda text: None).run(select(ROWS[:1]))
    ours, unknown = (results.rows[0].columns[column.name] for column in columns)
    assert ours.passes[0] > 0
    assert "there is no engine 'no-engine'" in unknown.missing
    about = results.versions[columns[0].name]
    assert Path(about["path"]).is_relative_to(ROOT / "src")
    results.write(tmp_path / "r.json")
    again = Results.read(tmp_path / "r.json")
    assert again.rows[0].columns[columns[0].name].passes == pytest.approx(ours.passes, rel=1e-5)
    assert "| llama-1b | one sequence, prompt 128 | ms/token |" in table(again)


@pytest.mark.full
def test_streams_are_measured_through_a_server(store: ModelStore) -> None:
    engine = Served(Opening(Path(store.path("llama-1b")), {"max_model_len": 128, "max_num_seqs": 4}, threads=1))
    try:
        trial = Trial(engine, 1)
        assert WORKLOADS["streams16"].tiny().run(trial) > 0
        assert trial.details["engine us/token"] >= 0
    finally:
        engine.close()


def test_a_worker_of_another_engine_needs_the_standard_library_alone() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); import benchmarks.worker, benchmarks.engines.vllm"
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", code, str(ROOT)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_environment_of_vllm_comes_from_a_shell_file(tmp_path: Path) -> None:
    setting = Setting(peer_env=tmp_path / "peer env.sh", source=tmp_path)
    (vllm,) = parse_columns("vllm[VLLM_X=1]")
    assert command(vllm, setting)[:2] == ["bash", "-c"]
    assert command(vllm, setting)[2].startswith(f". '{tmp_path}/peer env.sh' && exec python3 ")
    assert command(COLUMNS[0], setting)[0] == sys.executable
    variables = environment(vllm, setting)
    assert variables["VLLM_X"] == "1"
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / "src")


# -- two builds ------------------------------------------------------------------------------------------------------
def compared(first: list[float], second: list[float], workload: str = "decode1") -> Compared:
    return Compared(Row("S-q4_0", workload, "bifolio"), (first, second))


def test_a_verdict_needs_an_interval_on_one_side_of_the_limit() -> None:
    steady = [100.0, 100.1, 99.9, 100.0, 100.1, 99.9]
    assert compared(steady, steady).verdict(0.01) == "same"
    assert compared(steady, [0.97 * value for value in steady]).verdict(0.01) == "slower"
    assert compared(steady, [1.03 * value for value in steady]).verdict(0.01) == "faster"
    assert compared(steady, [1.03 * value for value in steady], "single").verdict(0.01) == "slower"  # ms/token
    noisy = [90.0, 100.0, 110.0, 100.0, 95.0, 105.0]
    assert compared(steady, noisy).verdict(0.01) == "unsure"
    assert compared(steady[:2], steady[:2]).verdict(0.01) == "unsure"  # one round
    assert compared([], []).verdict(0.01) == "unsure"


def test_a_drift_of_the_machine_cancels_within_a_round() -> None:
    speeds = [100.0 - number for number in range(12)]  # A B B A, three times, on a machine that becomes slower
    first = [speeds[4 * n + place] for n in range(3) for place in (0, 3)]
    second = [speeds[4 * n + place] for n in range(3) for place in (1, 2)]
    assert compared(first, second).verdict(0.01) == "same"


def test_exit_codes_name_the_worst_verdict() -> None:
    assert exit_code(["same", "faster"]) == 0
    assert exit_code(["same", "unsure"]) == 3
    assert exit_code(["unsure", "slower", "missing"]) == 1


def test_rounds_go_on_while_a_row_is_unsure(
    stand_in: type[StandIn], store: ModelStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["llama-1b/single", "--tiny", "--models", str(store.folder), "--builds", str(ROOT)]
    sizes = ["--rounds", "1", "--most", "4", "--json", str(tmp_path / "c.json")]
    assert compare.main([*names, str(ROOT), *sizes]) == 0
    assert "| llama-1b/single | ms/token | 2 | 2 |" in capsys.readouterr().out  # the first pass warms up
    row = json.loads((tmp_path / "c.json").read_text())["rows"][0]
    assert [row["columns"][name]["passes"] for name in "AB"] == [[2.0] * 4] * 2  # the second round decides
    with pytest.raises(ConfigError, match="is no checkout of bifolio"):
        compare.main([*names, str(tmp_path)])


def test_other_kernels_in_one_build_are_refused(
    stand_in: type[StandIn], store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src" / "bifolio").mkdir(parents=True)
    (tmp_path / "src" / "bifolio" / "__init__.py").touch()
    original = StandIn.__init__

    def other(self: StandIn, column: Column, model: Path | str, setting: Setting) -> None:
        original(self, column, model, setting)
        self.opened["about"]["kernels"] = "reference" if setting.source == tmp_path else "native"

    monkeypatch.setattr(StandIn, "__init__", other)
    arguments = ["llama-1b/single", "--tiny", "--models", str(store.folder), "--builds", str(ROOT), str(tmp_path)]
    with pytest.raises(ConfigError, match="different kernels"):
        compare.main(arguments)
