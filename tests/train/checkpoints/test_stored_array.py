"""Arrays of a checkpoint by pieces, however Orbax stored them."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from bytescope.train.checkpoints.checkpoint import checksums
from bytescope.train.checkpoints.stored_array import StoredArray

VALUES = np.random.default_rng(0).standard_normal((3, 10, 4), np.float32)


@pytest.fixture(scope="module")
def sums():
    """The checksums of VALUES in both dtypes."""
    return {dtype: int(checksums([jnp.asarray(VALUES, dtype)])[0]) for dtype in ("float32", "bfloat16")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "storage", [{}, {"use_ocdbt": False}, {"use_zarr3": True}, {"use_ocdbt": False, "use_zarr3": True}], ids=str
)
def test_pieces_are_the_array_and_its_checksum(storage, dtype, sums, tmp_path):
    values = VALUES.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**storage)) as checkpointer:
        checkpointer.save(tmp_path / "state", {"params": {"w": values}})
    for right in (True, False):
        array = StoredArray(tmp_path / "state", "params.w", dtype, VALUES.shape, sums[dtype] ^ (not right))
        spans = [
            [(layer, layer + 1), rows, columns]
            for columns in ((1, 4), (0, 1))
            for layer in (2, 0, 1)
            for rows in ((0, 3), (3, 10))
        ]
        for piece in spans[:-1]:
            assert np.array_equal(array.read(piece), values[tuple(slice(*span) for span in piece)])
        assert not array.is_read
        if right:
            array.read(spans[-1])
            assert array.is_read
        else:
            with pytest.raises(ValueError, match=r"params.w does not match its checksum"):
                array.read(spans[-1])


def test_another_array_than_the_recorded_one(tmp_path):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "state", {"params": {"w": VALUES}})
    for name, message in (("params.w", r"params.w is float32\[3, 10, 4\]"), ("params.v", "params.v")):
        with pytest.raises(ValueError, match=message):
            StoredArray(tmp_path / "state", name, "float32", (3, 40), 0)
