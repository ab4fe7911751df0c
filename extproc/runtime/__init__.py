# SPDX-License-Identifier: Apache-2.0
"""One process or several: joins the parts; depends on all but the command line."""
