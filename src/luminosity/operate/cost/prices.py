"""Price sheets: what a core, a GiB of RAM and an accelerator cost for an hour.

The sheet that Luminosity brings, ``prices.json``, has list prices with their source and date. It is also the form of
your own: pass it as ``--prices FILE``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from luminosity.errors import OptionError

__all__ = ["LEAST_SAVING", "NO_USAGE", "PriceList", "PriceSheet", "Usage", "load_prices"]

LEAST_SAVING = 0.05  # a smaller part of a bill is not worth a word: two runs differ as much
_PACKAGED = Path(__file__).with_name("prices.json")
_DEAREST = 1e12  # for an hour, in any currency: a sum of such prices stays a number
_SHEET_FIELDS = ("currency", "region", "lists")
_LIST_FIELDS = ("name", "source", "date", "core_hour", "gib_hour", "device_hour")
# The names of clouds that leave out what tells two devices of one kind apart.
_ALSO_CALLED = {"nvidia-tesla-a100": "nvidia-a100-40gb"}


@dataclass(frozen=True)
class Usage:
    """Resources over time, which a price list turns into money."""

    core_hours: float = 0.0
    gib_hours: float = 0.0
    device_hours: tuple[tuple[str, float], ...] = ()  # the names of devices and their hours

    def __add__(self, other: Usage) -> Usage:
        devices = dict(self.device_hours)
        for name, hours in other.device_hours:
            devices[name] = devices.get(name, 0.0) + hours
        return Usage(self.core_hours + other.core_hours, self.gib_hours + other.gib_hours, tuple(devices.items()))

    def times(self, factor: float) -> Usage:
        """Return ``factor`` times as much of everything."""
        devices = tuple((name, hours * factor) for name, hours in self.device_hours)
        return Usage(self.core_hours * factor, self.gib_hours * factor, devices)


NO_USAGE = Usage()


@dataclass(frozen=True)
class PriceList:
    """The prices of one seller for an hour, in the sheet's currency."""

    name: str
    source: str
    date: str
    core_hour: float
    gib_hour: float
    device_hour: tuple[tuple[str, float], ...]  # names such as "A100 40GB"; a device must have all their words

    def device_price(self, device: str) -> float | None:
        """Return the price of a device by the name that its driver or a resource hint gives it; None if not listed.

        >>> prices = PriceList("mine", "", "", 0.05, 0.004, (("T4", 0.4), ("A100 40GB", 3.0)))
        >>> [prices.device_price(name) for name in ("Tesla T4", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB")]
        [0.4, 3.0, None]
        """
        words = _words(_ALSO_CALLED.get(device.lower(), device))
        if "mig" in words:
            return None  # a part of a device; its price is not in a list of whole ones
        return next((price for name, price in self.device_hour if _words(name) <= words), None)

    def cost(self, usage: Usage) -> float:
        """Return the price of ``usage``. Devices without a price cost nothing: see :meth:`device_price`."""
        devices = sum((self.device_price(name) or 0.0) * hours for name, hours in usage.device_hours)
        return usage.core_hours * self.core_hour + usage.gib_hours * self.gib_hour + devices


@dataclass(frozen=True)
class PriceSheet:
    """One or more price lists. The first one is the main one; the others make the range of a bill."""

    currency: str
    region: str
    lists: tuple[PriceList, ...]

    def costs(self, usage: Usage) -> tuple[float, ...]:
        """Return the price of ``usage`` in each list."""
        return tuple(each.cost(usage) for each in self.lists)

    def unpriced(self, usage: Usage) -> list[str]:
        """Return the names of the devices in ``usage`` that some list has no price for."""
        names = [name for name, hours in usage.device_hours if hours]
        return [name for name in names if any(each.device_price(name) is None for each in self.lists)]


def load_prices(path: str | None = None) -> PriceSheet:
    """Return the price sheet in the JSON file ``path``, by default the one that Luminosity brings.

    Raises :class:`OptionError` if the file can't be read or is not a price sheet.

    >>> [(prices.name, prices.date) for prices in load_prices().lists]
    [('Dataflow batch', 'not dated'), ('Compute Engine', '2026-08-21')]
    """
    file = Path(path) if path is not None else _PACKAGED
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--prices={path}: can't read it: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--prices={path}: found no JSON ({error}), expected a price sheet") from error
    try:
        return _sheet(content)
    except OptionError as error:
        raise OptionError(f"--prices={path}: {error}", fix=f"start from a copy of {_PACKAGED}") from error


def _sheet(content: Any) -> PriceSheet:
    fields = _object(content, "the file", _SHEET_FIELDS)
    lists = fields["lists"]
    if not isinstance(lists, list) or not lists:
        raise OptionError(f"found {lists!r:.80} as 'lists', expected at least one price list")
    found = tuple(_price_list(each) for each in cast("list[Any]", lists))
    return PriceSheet(_text(fields, "currency"), _text(fields, "region"), found)


def _price_list(content: Any) -> PriceList:
    fields = _object(content, "a price list", _LIST_FIELDS)
    devices = _object(fields["device_hour"], "'device_hour'")
    for name in devices:
        if not _words(name):
            raise OptionError(f"found {name!r} as a name in 'device_hour', expected words such as 'A100 40GB'")
    return PriceList(
        name=_text(fields, "name"),
        source=_text(fields, "source"),
        date=_text(fields, "date"),
        core_hour=_price(fields, "core_hour"),
        gib_hour=_price(fields, "gib_hour"),
        device_hour=tuple((name, _price(devices, name)) for name in devices),
    )


def _object(content: Any, what: str, expected: tuple[str, ...] = ()) -> Mapping[str, Any]:
    if not isinstance(content, dict):
        raise OptionError(f"found {content!r:.80} as {what}, expected an object of names and values")
    fields = cast("dict[str, Any]", content)
    if expected and fields.keys() != set(expected):
        raise OptionError(f"found the fields {sorted(fields)} in {what}, expected {sorted(expected)}")
    return fields


def _text(fields: Mapping[str, Any], name: str) -> str:
    if not isinstance(fields[name], str):
        raise OptionError(f"found {fields[name]!r} as {name!r}, expected a text")
    return fields[name]


def _price(fields: Mapping[str, Any], name: str) -> float:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _DEAREST:
        raise OptionError(f"found {value!r:.80} as the price {name!r}, expected a number from 0 to {_DEAREST:,.0f}")
    return float(value)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
