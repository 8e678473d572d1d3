"""Groups of columns and penalty factors, as users give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bisls._check import shown
from bisls.sklearn.tuning import Grouping

REST = "rest"  # the group of columns that a mapping does not name
ALL = "all"  # the one group where there are none


@dataclass(frozen=True)
class Columns:
    """The columns of a table in groups.

    Attributes:
        groups: The name of each group and its columns, in the order of their first column.
        factors: A factor a column; 0 is never penalised.
    """

    groups: dict[Any, np.ndarray]
    factors: np.ndarray

    @staticmethod
    def read(call: str, count: int, names: Sequence[str] | None, groups: Any, factors: Any) -> Columns:
        """Read ``groups`` and ``penalty_factors``.

        Args:
            call: The estimator's name, for messages.
            count: How many columns there are.
            names: Their names, where the table has any.
            groups: None, "features", "blocks", a label a column, or a mapping of names to columns.
            factors: None, a number a column, or a mapping of columns to numbers.
        """
        reader = _Reader(call, count, None if names is None else list(names))
        return Columns(reader.groups(groups), reader.factors(factors))

    def grouping(self, intercept: bool) -> Grouping:
        """For the engines; groups without any penalty are one with the first, since nothing of theirs is tuned."""
        index = np.zeros(len(self.factors) + intercept, dtype=np.intp)
        tuned = [at for at in self.groups.values() if np.any(self.factors[at] > 0)]
        for number, at in enumerate(tuned):
            index[at] = number
        return Grouping(index, np.append(self.factors, np.zeros(int(intercept))), max(1, len(tuned)))

    def by_group(self, theta: np.ndarray) -> dict[Any, float]:
        """The penalty of each group; 0 where all of it is unpenalised."""
        tuned = iter(np.exp(theta))
        return {name: float(next(tuned)) if np.any(self.factors[at] > 0) else 0.0 for name, at in self.groups.items()}


@dataclass(frozen=True)
class _Reader:
    call: str
    count: int
    names: list[str] | None

    def wrong(self, argument: str, value: Any, rule: str) -> ValueError:
        return ValueError(f"`{self.call}({argument}={shown(value)})`: {argument} {rule}")

    def groups(self, groups: Any) -> dict[Any, np.ndarray]:
        every = np.arange(self.count)
        if groups is None:
            return {ALL: every}
        if isinstance(groups, str):
            return self._named(groups)
        if isinstance(groups, Mapping):
            return self._mapped(groups)
        try:
            labels = list(groups)
        except TypeError:
            labels = []
        if len(labels) != self.count:
            rule = (
                f'must be None, "features", "blocks", one label for each of the {self.count} columns, or a mapping of '
                f"names to columns{f'; these are {len(labels)} labels' if labels else ''}"
            )
            raise self.wrong("groups", groups, rule)
        labels = [label.item() if isinstance(label, np.generic) else label for label in labels]
        found: dict[Any, list[int]] = {}
        try:
            for column, label in enumerate(labels):
                found.setdefault(label, []).append(column)
            return {label: np.array(own) for label, own in found.items()}
        except (TypeError, ValueError):
            raise self.wrong("groups", groups, "must hold labels that can be compared and hashed") from None

    def _named(self, groups: str) -> dict[Any, np.ndarray]:
        if groups == "features":
            names: Iterable[Any] = self.names or range(self.count)
            return {name: np.array([at]) for at, name in enumerate(names)}
        if groups != "blocks":
            raise self.wrong("groups", groups, 'must be "features" or "blocks" where it is text')
        if self.names is None or not any("__" in name for name in self.names):
            rule = (
                "groups columns by what stands before `__` in their names, as a ColumnTransformer writes them; these columns "
                "have no such names: call set_output(transform='pandas') on it"
            )
            raise self.wrong("groups", groups, rule)
        blocks = [name.partition("__")[0] for name in self.names]
        return {block: np.flatnonzero(np.array(blocks) == block) for block in dict.fromkeys(blocks)}

    def _mapped(self, groups: Mapping[Any, Any]) -> dict[Any, np.ndarray]:
        owner: dict[int, Any] = {}
        found: dict[Any, np.ndarray] = {}
        for name, columns in groups.items():
            at = self._columns("groups", groups, columns)
            for column in at:
                if column in owner and owner[column] != name:
                    both = f"{owner[column]!r} and {name!r}"
                    raise self.wrong("groups", groups, f"must not share columns; column {column} is in {both}")
                owner[column] = name
            if at:  # a block of a ColumnTransformer may be empty
                found[name] = np.array(sorted(set(at)))
        rest = [column for column in range(self.count) if column not in owner]
        if rest:
            found[REST if REST not in found else (REST, "of the columns")] = np.array(rest)
        return dict(sorted(found.items(), key=lambda item: int(item[1][0])))

    def _columns(self, argument: str, value: Any, columns: Any) -> list[int]:
        if isinstance(columns, slice):
            return list(range(self.count))[columns]
        single = isinstance(columns, str | int | np.integer)
        try:
            entries: list[Any] = [columns] if single else list(columns)
        except TypeError:
            rule = f"has {columns!r} where columns should be: names, numbers, a mask or a slice"
            raise self.wrong(argument, value, rule) from None
        if entries and all(isinstance(entry, bool | np.bool_) for entry in entries):
            if len(entries) != self.count:
                raise self.wrong(argument, value, f"has a mask of {len(entries)} columns; there are {self.count}")
            return [at for at, wanted in enumerate(entries) if wanted]
        return [self._column(argument, value, entry) for entry in entries]

    def _column(self, argument: str, value: Any, entry: Any) -> int:
        if isinstance(entry, int | np.integer) and not isinstance(entry, bool):
            if -self.count <= entry < self.count:
                return int(entry) % self.count
            raise self.wrong(argument, value, f"names column {int(entry)}; there are {self.count}")
        if self.names is not None and entry in self.names:
            return self.names.index(entry)
        known = "the columns have no names here" if self.names is None else f"columns begin with {self.names[:5]}"
        raise self.wrong(argument, value, f"names a column {entry!r} that is not there; {known}")

    def factors(self, factors: Any) -> np.ndarray:
        made = np.ones(self.count)
        if factors is None:
            return made
        rule = f"must be at least 0 and finite, one for each of the {self.count} columns, or a mapping of columns to numbers"
        try:
            if isinstance(factors, Mapping):
                for column, factor in factors.items():
                    made[self._column("penalty_factors", factors, column)] = float(factor)
            else:
                made = np.array(factors, dtype=float)
        except (TypeError, ValueError) as error:
            own = str(error).startswith("`")  # a column that is not there
            raise error if own else self.wrong("penalty_factors", factors, rule) from None
        if made.shape != (self.count,) or not np.all(np.isfinite(made)) or np.any(made < 0):
            raise self.wrong("penalty_factors", factors, rule)
        return made
