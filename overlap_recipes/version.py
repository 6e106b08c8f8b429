# SPDX-License-Identifier: BSD-3-Clause
"""The version of the library, in a file of its own, which measured rows carry."""

__version__ = "0.3.0"
