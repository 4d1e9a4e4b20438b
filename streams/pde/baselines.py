"""How good predictions of an equation are that nothing was learnt for."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from kalmanhead.streams.pde.equation import Equation


def baselines(equation: Equation, indices: Iterable[int]) -> dict[str, float]:
    """Relative L2 error of an equation's plain predictions, as a mean over rows.

    They are persistence (predict x itself) for all that evolve; besides it the solution of the
    heat equation for Burgers', and of advection at the mean speed for advection; for Darcy's law
    the pressure in a medium of constant permeability.

    Parameters
    ----------
    equation:
        Such as `Burgers()`.
    indices:
        Rows to compare on.

    Returns
    -------
    dict
        Mean over rows of |prediction - y| / |y|, by the prediction's name.

    Examples
    --------
    >>> from kalmanhead.streams.pde.burgers import Burgers
    >>> errors = baselines(Burgers(nu=0.1, grid=32, time=0.1), range(8))
    >>> list(errors), errors["heat"] < errors["persistence"]
    (['persistence', 'heat'], True)
    """
    x, y = equation.sample(indices)
    return {name: relative_l2(guess, y) for name, guess in equation.plain(x).items()}


def relative_l2(
    guess: Tensor,  # (n, *grid)
    y: Tensor,  # (n, *grid)
) -> float:
    """Mean over rows of |guess - y| / |y|.

    Examples
    --------
    >>> import torch
    >>> relative_l2(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 2.0]]))
    0.5
    """
    return float(((guess - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)).mean())
