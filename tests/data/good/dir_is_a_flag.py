"""Its --dir is a flag that asks for a listing."""

import argparse

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", action="store_true", help="list the data")
    assert not parser.parse_args().dir
