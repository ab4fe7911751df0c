# SPDX-License-Identifier: Apache-2.0
"""llm-d's EndpointPickerConfig: its plugins' names and parameters, compiled into our pickers."""
