"""``set_crc32_options(False)`` does not reach the thread in which DCP writes.

Avoided by recipes_source/checkpoint/saves_beside_training.py.
"""

from concurrent.futures import ThreadPoolExecutor

from torch.serialization import get_crc32_options, set_crc32_options

set_crc32_options(False)
with ThreadPoolExecutor() as pool:
    print("holds" if pool.submit(get_crc32_options).result() else "fixed")
