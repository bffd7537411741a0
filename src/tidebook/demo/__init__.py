"""A small shop that uses all parts of a book together: `tidebook up --demo`, or `tidebook run tidebook.demo:shop`.

It uses only the public API, so that each module can be read as an example of one part.
"""

from tidebook.demo.shop import shop

__all__ = ["shop"]
