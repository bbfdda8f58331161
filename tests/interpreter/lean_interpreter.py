"""Triton's interpreter without its repeated work; results and checks of its operations stay the same.

The interpreter builds Python objects for every operation of every program, and that is most of its time:

- it replaces the functions of `triton.language` at each launch and each call of a device function: here, once;
- it computes integers again in 64 bits to find overflows, and drops the result unless `debug` is set: here, not;
- types of blocks and shapes of tensors are built anew for each operation: here, once for each type.

Versions of triton that are not listed run as they are, and slower.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from functools import cache
from typing import Any

VERSIONS = ("3.9.",)


def make_lean() -> None:
    import triton

    if not triton.__version__.startswith(VERSIONS):
        remember_builtins()
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    patch_language_once(interpreter)
    remember_types(interpreter)
    remember_shapes(interpreter.tl.core)
    leave_equal_shapes(interpreter.TritonSemantic)


def remember_builtins() -> None:
    """Let the interpreter list the builtins of a module once: it does so at every call of a device function."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_builtin") or not hasattr(interpreter, "_patch_attr"):
        return
    is_builtin, patch_attr = interpreter.tl.core.is_builtin, interpreter._patch_attr

    @cache
    def names(module: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(module) if is_builtin(member)]

    def patch_builtin(module: Any, *arguments: Any) -> None:
        for name in names(module):
            member = getattr(module, name)
            if is_builtin(member):  # not yet patched
                patch_attr(module, name, member, *arguments)

    interpreter._patch_builtin = patch_builtin


def patch_language_once(interpreter: Any) -> None:
    """Replace the functions of the language at the first use of a module, for good: the process compiles nothing."""
    patch, languages = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    nothing_to_restore = interpreter._LangPatchScope()
    patched: set[tuple[int, ...]] = set()

    @cache
    def used_by(fn: Any) -> tuple[int, ...]:
        values = fn.__globals__.values()
        return tuple(number for number, each in enumerate(languages) if any(value is each for value in values))

    def patch_once(fn: Any) -> Any:
        used = used_by(fn)
        if used not in patched:
            patch(fn)
            patched.add(used)
        return nothing_to_restore

    interpreter._patch_lang = patch_once


def remember_types(interpreter: Any) -> None:
    """Look up the numpy type of a type of the language; the original builds the table of all types at each call."""
    tl, original = interpreter.tl, interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def numpy_type(kind: Any) -> Any:
        scalar = kind.scalar
        if isinstance(scalar, tl.pointer_type):
            return original(scalar)
        known = found.get(scalar.name)
        if known is None:
            known = found[scalar.name] = original(scalar)
        return known

    interpreter._get_np_dtype = numpy_type


def remember_shapes(core: Any) -> None:
    """Build the attributes of a block type and of its tensors once for each element type and shape."""
    init_block, compare = core.block_type.__init__, core.dtype.__eq__
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [getattr(size, "value", size) for size in shape]
        key = (element_ty.name, *sizes)
        known = blocks.get(key)
        if known is not None and set(map(type, sizes)) == {int}:  # 4.0 is an error, and equal to 4
            self.__dict__.update(known)
            self.element_ty = element_ty
        else:
            init_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        known = shapes.get(sizes)
        if known is None:
            shape = core.tuple([core.constexpr(size) for size in sizes])
            known = shapes[sizes] = (core.constexpr(math.prod(sizes)), shape)
        self.numel, self.shape = known

    def equal_types(self: Any, other: Any) -> bool:
        return self is other or compare(self, other)

    core.dtype.__eq__ = equal_types
    core.block_type.__init__ = block_init
    core.tensor.__init__ = tensor_init


def leave_equal_shapes(semantic: Any) -> None:
    """Return operands of the same shape as they are, without a comparison of each dimension."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_unequal(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_unequal
