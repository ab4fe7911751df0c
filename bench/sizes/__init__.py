# SPDX-License-Identifier: Apache-2.0
"""How cost grows with the size of a configuration: a table and a picture, through the real Envoy"""
