"""One child is ended, another fails and is looked at, a third is well."""

import multiprocessing
import sys
import threading

if __name__ == "__main__":
    waits = multiprocessing.Process(target=threading.Event().wait)
    waits.start()
    waits.terminate()
    waits.join()
    fails = multiprocessing.Process(target=sys.exit, args=(3,))
    fails.start()
    fails.join()
    assert fails.exitcode == 3
    ends = multiprocessing.Process(target=print, args=("well",))
    ends.start()
    ends.join()
