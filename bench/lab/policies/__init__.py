# SPDX-License-Identifier: Apache-2.0
"""The field's picking policies, and policies from files; knows engine and the observers of virtual."""
