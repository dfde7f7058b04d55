"""Replace methods of a single model, without changing its class."""

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any


class ModelMethod:
    """A method of one model. A copy of the model gets a copy of the method.

    Attributes:
        name: Name of the method.
        arguments: Arguments of the constructor, which a copy of the method gets as well.
        old_attribute: The replaced attribute of the model. None if only the class has the method.
    """

    name: str

    def __init__(
        self, model: Any, *arguments: Any, old_attribute: Callable[..., Any] | None = None
    ) -> None:
        self._model = weakref.ref(model)  # weak, because the model refers to this object
        self.arguments, self.old_attribute = arguments, old_attribute

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
        model = memo.get(id(self.model), self.model)
        return type(self)(model, *self.arguments, old_attribute=self.old_attribute)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), old_attribute=self.old_attribute), (self.model, *self.arguments)


def remove_methods(model: Any) -> None:
    """Undo `ModelMethod.install`, except for methods that other code has replaced since."""
    for name, method in list(vars(model).items()):
        if isinstance(method, ModelMethod):
            del vars(model)[name]
            if method.old_attribute is not None:
                vars(model)[name] = method.old_attribute
