"""A build begins without what an earlier one has left: a module that is gone would come back."""

import shutil

from setuptools import setup
from setuptools.command.build import build


class CleanBuild(build):
    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


if __name__ == "__main__":
    setup(cmdclass={"build": CleanBuild})
