"""Imports with the collector of garbage paused: what they made is old at once, and what a program froze stays so."""

from onnxgrad import subprocesses

CODE = """
import gc
from onnxgrad._later import without_collection

def collections(**keywords):
    seen = []
    gc.collect()
    gc.callbacks.append(lambda phase, info: seen.append(info["generation"]))
    with without_collection(**keywords):
        made = [[] for _ in range(5000)]
    is_old = any(o is made for o in gc.get_objects(generation=2))
    gc.callbacks.pop()
    assert gc.isenabled()
    return len(seen), is_old

assert collections() == (2, False)  # as it starts and ends
some_frozen = gc.get_freeze_count()  # Python 3.12 freezes what is immortal
assert collections(all_stay=True) == ((2, False) if some_frozen else (0, True))
gc.freeze()
frozen = gc.get_freeze_count()
assert collections(all_stay=True) == (2, False)
assert gc.get_freeze_count() == frozen
gc.disable()
with without_collection(all_stay=True):
    pass
assert not gc.isenabled()
"""


def test_what_an_import_made_is_old_at_once():
    found = subprocesses.run([*subprocesses.PYTHON, "-c", CODE], text=True)
    assert found.returncode == 0, found.stderr
