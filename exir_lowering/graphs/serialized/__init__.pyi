from .container import NotSerialisableError as NotSerialisableError
from .decoding import decode as decode
from .encoding import Encoded as Encoded, encode as encode
