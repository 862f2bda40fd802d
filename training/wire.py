"""Logged rows as the tensors a client would send."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from perennial.spec import FeatureType, ModelSpec

_NUMPY = {FeatureType.INT: np.int64, FeatureType.FLOAT: np.float32, FeatureType.BOOL: np.bool_}
_UNKNOWN = {
    FeatureType.STRING: "",
    FeatureType.INT: 0,
    FeatureType.FLOAT: float("nan"),
    FeatureType.BOOL: False,
}


def tensors_of(spec: ModelSpec, rows: pa.Table) -> dict[str, np.ndarray]:
    """Every feature [row] in its dtype on the wire; strings as bytes, unknown numbers as NaN.

    What the recorder masked is unknown here; the model does not read it.
    """
    tensors = {}
    for name, feature in spec.data.features.items():
        column = rows[f"feature_{name}"]
        if pa.types.is_null(column.type) or feature.sensitive:
            column = pa.chunked_array([pa.array([_UNKNOWN[feature.type]] * rows.num_rows)])
        known = pc.fill_null(column, _UNKNOWN[feature.type])
        if feature.type == FeatureType.STRING:
            tensors[name] = known.cast(pa.binary()).to_numpy()
        else:
            tensors[name] = known.to_numpy().astype(_NUMPY[feature.type])
    return tensors
