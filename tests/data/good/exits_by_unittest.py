"""Its checks are a unittest."""

import unittest


class Claims(unittest.TestCase):
    def test_one_is_one(self) -> None:
        self.assertEqual(1, 1)


if __name__ == "__main__":
    unittest.main(argv=["claims"])
