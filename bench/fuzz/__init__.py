# SPDX-License-Identifier: Apache-2.0
"""Broken input at random: configuration files for the loader, request bodies for the whole stack."""
