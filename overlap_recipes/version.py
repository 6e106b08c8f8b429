# SPDX-License-Identifier: BSD-3-Clause
"""The version of the library, in a file of its own: raising it makes no measured row stale."""

__version__ = "0.2.1"
