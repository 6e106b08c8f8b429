"""C++ code crashes when the process ends, after the interpreter has."""

import ctypes

if __name__ == "__main__":
    libc = ctypes.CDLL(None)
    libc["__cxa_atexit"](ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
