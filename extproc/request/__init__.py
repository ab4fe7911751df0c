# SPDX-License-Identifier: Apache-2.0
"""Bodies of the OpenAI APIs: parsed into what decisions need, and changed where the engine needs other fields."""
