"""An executor that the interpreter ends."""

import time
from concurrent.futures import ThreadPoolExecutor

if __name__ == "__main__":
    executor = ThreadPoolExecutor(2)
    executor.submit(time.sleep, 0.3)
