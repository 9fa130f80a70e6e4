"""Hash-consing: equal values are one object, so equality is identity."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast, dataclass_transform
from weakref import WeakValueDictionary

T = TypeVar("T")


@dataclass_transform(eq_default=False)
def hash_consed(key: Callable[..., Hashable] | None = None) -> Callable[[type[T]], type[T]]:
    """A decorator for classes: a call with the fields of an object that is alive gives that object.

    Fields are the annotations of the class; arguments are positional, without defaults. They are compared as they are,
    or by what ``key`` makes of them. ``__post_init__`` completes a new object. The table is the class's own and holds
    its objects weakly.

    A base class with a metaclass would slow down every ``isinstance`` that is false, which Python answers quickly for
    plain classes alone.
    """

    def decorate(cls: type[T]) -> type[T]:
        table: WeakValueDictionary[Hashable, T] = WeakValueDictionary()
        # Its dictionary of references is read directly: ``table.get`` is a function of Python, a third of all that
        # finding an object takes.
        find: Callable[[Hashable], Callable[[], T | None] | None] = vars(table)["data"].get
        create, fields = object.__new__, tuple(cls.__annotations__)

        def new(cls: type[T], *args: Any) -> T:
            known = args if key is None else key(*args)
            reference = find(known)
            found = None if reference is None else reference()
            if found is None:
                found = create(cls)
                for field, value in zip(fields, args, strict=True):
                    setattr(found, field, value)
                complete(found)
                table[known] = found
            return found

        complete = getattr(cls, "__post_init__", lambda _: None)
        own = [name for name in (*fields, "__weakref__") if not hasattr(cls.__base__, name)]
        body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
        return cast("type[T]", type(cls.__name__, cls.__bases__, {**body, "__slots__": own, "__new__": new}))

    return decorate
