"""``shelf://``: a bucket, as far as anyone can tell from its addresses; its files lie on the disk."""

from collections.abc import Callable
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Shelf(LocalFileSystem):
    """A remote file system that can be made to wait before it writes."""

    protocol = "shelf"
    #: called before a file is opened to be written
    before_write: ClassVar[Callable[[str], object]] = staticmethod(lambda path: None)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix("shelf://") if isinstance(path, str) else path)

    def _open(self, path: str, mode: str = "rb", *arguments: Any, **options: Any) -> Any:
        if "w" in mode:
            type(self).before_write(path)
        return super()._open(path, mode, *arguments, **options)


fsspec.register_implementation("shelf", Shelf, clobber=True)
