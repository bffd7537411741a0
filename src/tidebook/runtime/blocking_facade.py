"""Derive blocking classes from async ones: each method keeps its name, parameters, types and docstring."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

from tidebook.runtime.blocking_portal import BlockingPortal

Async = TypeVar("Async")
P = ParamSpec("P")
T = TypeVar("T")
Facade = TypeVar("Facade")


class BlockingFacade(Generic[Async]):
    """The blocking form of an object: the same names without `await`, callable from any thread."""

    def __init__(self, portal: BlockingPortal, target: Async) -> None:
        self._portal = portal
        self._target = target


def blocking(
    method: Callable[Concatenate[Async, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingFacade[Async], P], T]:
    """Return the blocking form of a coroutine function: a method of the facade that runs it on the portal.

    >>> class Greeter:
    ...     async def greet(self, name: str) -> str:
    ...         return f"hello {name}"
    >>> class SyncGreeter(BlockingFacade[Greeter]):
    ...     greet = blocking(Greeter.greet)
    """

    @wraps(method)
    def call(self: BlockingFacade[Async], /, *args: P.args, **kwargs: P.kwargs) -> T:
        portal = self._portal  # a facade that is not open raises here, before it creates a coroutine that never runs
        coroutine: Coroutine[Any, Any, T] = getattr(self._target, method.__name__)(*args, **kwargs)
        return portal.run(coroutine)

    return call


def iterating(
    method: Callable[Concatenate[Async, P], AsyncIterator[T]],
) -> Callable[Concatenate[BlockingFacade[Async], P], Iterator[T]]:
    """Return the blocking form of a method that returns an async iterator."""

    @wraps(method)
    def call(self: BlockingFacade[Async], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._portal.iterate(getattr(self._target, method.__name__)(*args, **kwargs))

    return call


def wrapping(
    method: Callable[Concatenate[Async, P], T], wrap: Callable[[BlockingPortal, T], Facade]
) -> Callable[Concatenate[BlockingFacade[Async], P], Facade]:
    """Return the blocking form of a method that returns an object that needs a facade too, which `wrap` creates."""

    @wraps(method)
    def call(self: BlockingFacade[Async], /, *args: P.args, **kwargs: P.kwargs) -> Facade:
        return wrap(self._portal, getattr(self._target, method.__name__)(*args, **kwargs))

    return call


class forwarded(Generic[Async, T]):
    """A property of a facade that returns the property of the async object; use it like `property`."""

    def __init__(self, getter: Callable[[Async], T]) -> None:
        self.__doc__ = getter.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, facade: BlockingFacade[Async] | None, owner: type) -> T:
        return cast(T, self if facade is None else getattr(facade._target, self._name))
