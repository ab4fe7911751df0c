# SPDX-License-Identifier: Apache-2.0
"""Requests, answers and streams of chat, messages and responses, each in the form of another; pure."""
