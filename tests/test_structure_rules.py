"""Rules of the structure, asserted on the syntax trees of `src/`.

kernel sets         every member is accessed by name and no code branches on `kernels.name`; files outside `kernels/`
                    import its public modules alone, never those of a set
operations          an operation of the network is written once in each kernel set, and few files name it
attention segments  `AttentionSegment(...)` is constructed in one module
progress            `num_computed` of a sequence is assigned in one file
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from syntax_trees import PACKAGE, nodes, source_trees
from test_import_order import modules_of

KERNEL_SET_CLASS = re.compile(r"\b(KernelSet|[A-Z]\w*Kernels)\b")  # KernelSet, NativeKernels, TritonKernels, ...
KERNEL_SET_NAME = re.compile(r"\w*kernels|kernel_set")  # how variables and attributes for kernel sets are called
PUBLIC_KERNEL_MODULES = {
    "block_copies",
    "operation_hook",
    "cpu",
    "interface",
    "logit_edits",
    "select",
    "storage",
    "torch_dtypes",
    "torch_ranks",
    "weights",
}
REFLECTION = {"getattr", "hasattr", "setattr", "delattr"}


def last_name(node: ast.expr) -> str:
    """`engine.runner.kernels` -> `kernels`; the empty string for other expressions than names and attributes."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


@cache
def kernel_set_names(tree: ast.AST) -> set[str]:
    """Names and attributes that are annotated with a kernel set, or assigned from such a name."""
    names = {argument.arg for argument in nodes(tree, ast.arg) if is_kernel_set(argument.annotation)}
    names |= {last_name(node.target) for node in nodes(tree, ast.AnnAssign) if is_kernel_set(node.annotation)}
    if any(KERNEL_SET_CLASS.fullmatch(node.name) for node in nodes(tree, ast.ClassDef)):
        names.add("self")
    for node in nodes(tree, ast.Assign):
        if last_name(node.value) in names - {"self"}:
            names |= {last_name(target) for target in node.targets}
    return names - {""}


def is_kernel_set(annotation: ast.expr | None) -> bool:
    """Whether the annotation is a kernel set or an optional one; a callable on a kernel set is none."""
    if annotation is None:
        return False
    parts = ast.unparse(annotation).strip("'\"").split(" | ")
    return any(KERNEL_SET_CLASS.fullmatch(part) for part in parts)


def reflections(tree: ast.Module) -> Iterator[int]:
    """Lines that call `getattr` or its relatives on a kernel set."""
    names = kernel_set_names(tree)
    for node in nodes(tree, ast.Call):
        if last_name(node.func) in REFLECTION and node.args:
            name = last_name(node.args[0])
            if name in names or KERNEL_SET_NAME.fullmatch(name):
                yield node.lineno


def name_tests(tree: ast.Module) -> Iterator[int]:
    """Lines that compare the name of a kernel set, or match on it."""
    names = kernel_set_names(tree)
    for node in nodes(tree, ast.Compare, ast.Match, ast.Call):
        compared: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            compared = [node.subject]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # kernels.name.startswith(...)
            compared = [node.func.value]
        for value in compared:
            if isinstance(value, ast.Attribute) and value.attr == "name":
                owner = last_name(value.value)
                if owner in names or KERNEL_SET_NAME.fullmatch(owner):
                    yield value.lineno


def segment_constructions(tree: ast.Module) -> Iterator[int]:
    """Lines that construct an `AttentionSegment`."""
    for node in nodes(tree, ast.Call):
        if last_name(node.func) == "AttentionSegment":
            yield node.lineno


def progress_assignments(tree: ast.Module) -> Iterator[int]:
    """Lines that assign `num_computed` of an object."""
    for node in nodes(tree, ast.Attribute):
        if node.attr == "num_computed" and isinstance(node.ctx, ast.Store):
            yield node.lineno
    for node in nodes(tree, ast.Call):
        if last_name(node.func) in {"setattr", "__setattr__"}:
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from [node.lineno] * ("num_computed" in names)


def names_of(tree: ast.Module) -> set[str]:
    """Names of functions, attributes, and strings that are one word."""
    found = {node.name for node in nodes(tree, ast.FunctionDef)} | {node.attr for node in nodes(tree, ast.Attribute)}
    return found | {node.value for node in nodes(tree, ast.Constant) if isinstance(node.value, str)}


def private_kernel_imports(tree: ast.Module) -> Iterator[int]:
    """Lines that import a module of a kernel set (`kernels.native.library`), or name it in a string."""
    for node in nodes(tree, ast.Import, ast.ImportFrom, ast.Constant):
        for module in modules_of(node, "engine/engine.py"):
            package, _, rest = module.partition("bifolio.kernels")
            if not package and rest.startswith(".") and rest.split(".")[1] not in PUBLIC_KERNEL_MODULES:
                yield node.lineno


Rule = Callable[[ast.Module], Iterator[int]]


def places(rule: Rule) -> dict[str, list[int]]:
    """The lines that a rule finds, by file."""
    found = {path: list(rule(tree)) for path, tree in source_trees().items()}
    return {path: lines for path, lines in found.items() if lines}


def test_kernel_sets_are_used_without_reflection() -> None:
    assert places(reflections) == {}


def test_no_code_branches_on_the_name_of_a_kernel_set() -> None:
    assert places(name_tests) == {}


def test_attention_segments_are_constructed_in_one_module() -> None:
    assert set(places(segment_constructions)) == {"schedule/orchestrators.py"}


def test_progress_is_assigned_in_one_file() -> None:
    assert set(places(progress_assignments)) == {"sequence.py"}


@pytest.mark.parametrize("name", ["add_norm", "mix_streams", "join_latent", "mix_experts"])
def test_an_operation_is_named_in_few_files(name: str) -> None:
    files = [path for path, tree in source_trees().items() if name in names_of(tree)]
    assert len(files) <= 8, files


def test_modules_of_a_kernel_set_are_private_to_the_kernels() -> None:
    outside = {path for path in places(private_kernel_imports) if not path.startswith("kernels/")}
    assert outside == set(), "import from bifolio.kernels.select or bifolio.kernels.cpu instead"


def test_the_public_kernel_modules_exist() -> None:
    assert {path.stem for path in (PACKAGE / "kernels").glob("*.py")} >= PUBLIC_KERNEL_MODULES


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (reflections, "getattr(engine.runner.kernels, 'run', None)"),
        (reflections, "def f(inner: KernelSet): return hasattr(inner, 'run')"),
        (reflections, "def f(inner: TritonKernels | None): return getattr(inner, 'run')"),
        (
            reflections,
            "class P:\n def f(self, x: KernelSet): self.inner = x\n def g(self): getattr(self.inner, 'a')",
        ),
        (reflections, "class NativeKernels:\n def f(self): return getattr(self, 'run')"),
        (name_tests, "kernels.name == 'triton'"),
        (name_tests, "'triton' != self._kernels.name"),
        (name_tests, "runner.kernels.name in ('torch', 'triton')"),
        (name_tests, "def f(inner: 'KernelSet'): return inner.name == 'native'"),
        (name_tests, "match kernels.name:\n case 'native': pass"),
        (name_tests, "kernels.name.startswith('tri')"),
        (segment_constructions, "AttentionSegment(phase, 0, 1)"),
        (segment_constructions, "interface.AttentionSegment(phase, 0, 1)"),
        (progress_assignments, "sequence.num_computed = 3"),
        (progress_assignments, "slot.sequence.num_computed += 1"),
        (progress_assignments, "first, sequence.num_computed = 1, 2"),
        (progress_assignments, "setattr(sequence, 'num_computed', 3)"),
        (progress_assignments, "object.__setattr__(sequence, 'num_computed', 3)"),
        (private_kernel_imports, "from bifolio.kernels.native.library import library"),
        (private_kernel_imports, "def f():\n    from bifolio.kernels import native"),
        (private_kernel_imports, "import bifolio.kernels.triton.kernel_set as triton"),
        (private_kernel_imports, "from ..kernels.torch_reference import TorchKernels"),
        (private_kernel_imports, "import_module('bifolio.kernels.reference')"),
    ],
)
def test_a_violation_is_found(rule: Rule, source: str) -> None:
    assert list(rule(ast.parse(source)))


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (reflections, "getattr(params, 'seed')"),
        (reflections, "def f(make: Callable[[KernelSet], int]): return getattr(make, '__name__')"),
        (name_tests, "message.name == 'user'"),
        (name_tests, "print(kernels.name)"),
        (segment_constructions, "def f(segment: AttentionSegment): return replace(segment, fresh=False)"),
        (progress_assignments, "num_computed = sequence.num_computed"),
        (private_kernel_imports, "from bifolio.kernels.interface import KernelSet"),
        (private_kernel_imports, "from bifolio.kernels import cpu, select"),
        (private_kernel_imports, "from bifolio.quant.formats import QuantFormat"),
    ],
)
def test_other_code_is_accepted(rule: Rule, source: str) -> None:
    assert not list(rule(ast.parse(source)))
