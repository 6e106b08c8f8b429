"""Ends while a thread that it started goes on."""

import threading

if __name__ == "__main__":
    threading.Thread(target=threading.Event().wait, name="uploader").start()
