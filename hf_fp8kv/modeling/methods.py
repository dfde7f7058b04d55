"""Attributes and methods of a single model, which do not change its class."""

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")


class ModelAttribute(Generic[_Value]):
    """An attribute that the package sets on models or modules.

    A copy of a model has a copy of the value. torch does not register the value, so it may be a
    tensor or hold a module.

    Attributes:
        name: Name of the attribute.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def is_set(self, model: Any) -> bool:
        """Return whether the model itself has the attribute. Wrappers and classes do not count."""
        return self.name in getattr(model, "__dict__", ())

    def get(self, model: Any) -> _Value | None:
        """Return the value, or None if the attribute is not set."""
        return getattr(model, "__dict__", {}).get(self.name)

    def set(self, model: Any, value: _Value) -> None:
        """Set the attribute of this model only."""
        vars(model)[self.name] = value

    def remove(self, model: Any) -> _Value | None:
        """Remove the attribute, and return its value. None means that it was not set."""
        return vars(model).pop(self.name, None)  # type: ignore[no-any-return]


class ModelMethod:
    """A method of one model, which is replaced by a function of a module.

    A copy of the model gets a copy of the method.

    Attributes:
        name: Name of the method.
        function: The function, which is called with this object and the arguments of a call.
        arguments: Further arguments of the constructor, for `function` to read.
        old_attribute: The replaced attribute of the model. None if only the class has the method.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        function: Callable[..., Any],
        *arguments: Any,
        old_attribute: Callable[..., Any] | None = None,
    ) -> None:
        self._model = weakref.ref(model)  # weak, because the model refers to this object
        self.name = name
        self.function = function
        self.arguments = arguments
        self.old_attribute = old_attribute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)

    def install(self) -> None:
        """Replace the method, if the model has a method of this name."""
        if hasattr(self.model, self.name):
            self.old_attribute = vars(self.model).get(self.name)
            vars(self.model)[self.name] = self

    @property
    def model(self) -> Any:
        """The model. It exists in each call of the method, because the model holds the method."""
        return self._model()

    @property
    def original_method(self) -> Callable[..., Any]:
        """The replaced method."""
        return self.old_attribute or getattr(type(self.model), self.name).__get__(self.model)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the replaced method, which transformers inspects."""
        return inspect.signature(self.original_method)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelMethod":
        make, (model, *arguments) = self.__reduce__()
        return make(memo.get(id(model), model), *arguments)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = self.model, self.name, self.function, *self.arguments
        return partial(ModelMethod, old_attribute=self.old_attribute), arguments


def remove_methods(model: Any) -> None:
    """Undo `ModelMethod.install`, except for methods that other code has replaced since."""
    for name, method in list(vars(model).items()):
        if isinstance(method, ModelMethod):
            del vars(model)[name]
            if method.old_attribute is not None:
                vars(model)[name] = method.old_attribute
