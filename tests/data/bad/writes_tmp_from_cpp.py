"""C++ code writes to /tmp."""

import torch

if __name__ == "__main__":
    writer = torch._C.PyTorchFileWriter("/tmp/rankproof-cpp.bin")
    writer.write_record("x", b"1234", 4)
    writer.write_end_of_file()
