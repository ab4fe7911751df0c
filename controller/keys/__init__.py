# SPDX-License-Identifier: Apache-2.0
"""Virtual API keys: what is changed in a KeyStore, by the command line and by an admin API."""
