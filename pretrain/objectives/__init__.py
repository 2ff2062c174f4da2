"""Training objectives, one file each; importing the package registers them all."""

from . import block as block
from . import causal as causal
from . import eso as eso
from . import masked as masked
from . import perturbed as perturbed
from . import uniform as uniform
