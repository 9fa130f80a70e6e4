"""What outlives a process: entries under a key that says all they depend on, in a folder of the user and on remotes.

Values are bytes to this package. Nothing in an entry is unpickled or evaluated, and what was not verified is not used.
"""

from torchkiln.cache.key import CacheKey, Difference
from torchkiln.cache.store import Cache, Miss, open_cache, record_misses

__all__ = ["Cache", "CacheKey", "Difference", "Miss", "open_cache", "record_misses"]
