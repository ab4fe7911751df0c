# SPDX-License-Identifier: Apache-2.0
"""The controller's commands: options, and what they start."""
