"""Protos beside the entries of jax's persistent compilation cache."""

import logging
import threading

import jax
import jax.numpy as jnp
import pytest

from bytescope.memory.devices.compile_cache import Entry, record_lookups

pytestmark = pytest.mark.quick


def compiled():
    def thrice(x):
        return 3 * x

    return float(jax.jit(thrice)(jnp.float32(2)))


def entry(folder, key):
    (folder / f"{key}-cache").write_bytes(b"an executable")
    return Entry(key, hit=True)


def test_protos_do_not_pile_up(folder):
    """Of one entry the newest four stay, of one that jax has evicted none."""
    own, other = entry(folder, "jit_step-0a1b"), entry(folder, "jit_step-0a1bc")
    other.save_proto("text", b"proto", {})
    (folder / "jit_step-0a1bc-cache").unlink()
    for number in range(6):
        own.save_proto(f"text{number}", b"proto", {})
    assert sorted(path.name for path in folder.glob("*.buffers.gz")) == [
        f"jit_step-0a1b-text{number}.buffers.gz" for number in range(2, 6)
    ]


@pytest.mark.parametrize("written", [b"", b"another executable"])
def test_an_entry_is_back_where_jax_writes_no_other(folder, written):
    own = entry(folder, "jit_step-0a1b")
    path = folder / "jit_step-0a1b-cache"
    with own.removed() as gone:
        assert gone and not path.exists()
        if written:
            path.write_bytes(written)
    assert path.read_bytes() == (written or b"an executable")
    with Entry("jit_step-ffff", hit=True).removed() as gone:
        assert gone
    assert not (folder / "jit_step-ffff-cache").exists()


def test_the_keys_of_this_thread_are_seen_and_no_line_is_logged(folder, caplog):
    level = logging.getLogger("jax._src.compiler").level
    with record_lookups() as first:
        compiled()
        other = threading.Thread(target=lambda: jax.jit(lambda x: x * 7)(jnp.float32(2)))
        other.start()
        other.join()
    jax.clear_caches()
    with record_lookups() as second:
        compiled()
    assert [(each.key, each.hit) for each in first[-1:]] == [(second[-1].key, False)] and second[-1].hit
    assert second[-1].path().exists() and all(each.key.startswith("jit_thrice") for each in first[-1:])
    assert not [record for record in caplog.records if "cache" in record.getMessage().lower()]
    assert logging.getLogger("jax._src.compiler").level == level
