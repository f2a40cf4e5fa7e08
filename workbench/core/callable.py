"""Packages that share their name with the function users call: ``wb.corpus(...)`` and ``workbench.corpus.x`` both work.

Importing a submodule binds it on its parent, so a facade function of the same name would be hidden or not depending
on what was imported first. A callable package is both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(name: str, function: Callable[..., Any]) -> None:
    """Make the package ``name`` callable as ``function``, with its signature and documentation.

    Args:
        name: The package's ``__name__``.
        function: What a call does.
    """

    class CallablePackage(ModuleType):
        """A package that can be called."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    module = sys.modules[name]
    module.__class__ = CallablePackage
    module.__doc__ = f"{function.__doc__}\n\n{module.__doc__ or ''}"
    module.__wrapped__ = function  # type: ignore[attr-defined]
