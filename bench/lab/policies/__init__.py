# SPDX-License-Identifier: Apache-2.0
"""The field's picking policies, and policies from files; depends on engine and the observers of virtual."""
