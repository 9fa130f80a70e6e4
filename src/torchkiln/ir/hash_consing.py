"""Hash-consing: equal values are one object, so equality is identity."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


def hash_consed(key: Callable[..., Hashable] | None = None) -> Callable[[type[T]], type[T]]:
    """A decorator for classes: a call with arguments of an object that is alive gives that object.

    ``__init__`` fills new objects only. Arguments are positional, without defaults. They are compared as they are, or
    by what ``key`` makes of them. The table is the class's own and holds its objects weakly.

    A base class with a metaclass would slow down every ``isinstance`` that is false, which Python answers quickly for
    plain classes alone.
    """

    def decorate(cls: type[T]) -> type[T]:
        table: WeakValueDictionary[Hashable, T] = WeakValueDictionary()
        # Its dictionary of references is read directly: ``table.get`` is a function of Python, a third of all that
        # finding an object takes.
        find: Callable[[Hashable], Callable[[], T | None] | None] = vars(table)["data"].get
        create, fill = object.__new__, vars(cls)["__init__"]
        if key is None:

            def new(cls: type[T], *args: Any) -> T:
                reference = find(args)
                found = None if reference is None else reference()
                if found is None:
                    found = create(cls)
                    fill(found, *args)
                    table[args] = found
                return found

        else:

            def new(cls: type[T], *args: Any) -> T:
                known = key(*args)
                reference = find(known)
                found = None if reference is None else reference()
                if found is None:
                    found = create(cls)
                    fill(found, *args)
                    table[known] = found
                return found

        # Python would run ``__init__`` again for an object that was found.
        type.__delattr__(cls, "__init__")
        type.__setattr__(cls, "__new__", new)
        return cls

    return decorate
