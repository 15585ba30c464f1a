"The package, as settings.ini describes it"
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(interpolation=None)
ini.read_string((here/'settings.ini').read_text(encoding='utf-8'))
cfg = ini.defaults()
pythons = cfg['python_versions'].split()
extra = '_requirements'
labs = 'gpubench.notebooks' # nbs/labs travels in the wheel, so that `gpubench labs` finds it

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'],
    keywords=cfg['keywords'].split(), license_expression=cfg['license'],
    author=cfg['author'], author_email=cfg['author_email'],
    project_urls=dict(Repository=cfg['git_url'], Homepage=cfg['doc_url']),
    long_description=(here/'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    classifiers=['Development Status :: 3 - Alpha', 'Intended Audience :: Education',
                 'Natural Language :: English',
                 *(f'Programming Language :: Python :: {o}' for o in pythons)],
    python_requires=f'>={pythons[0]}', install_requires=cfg['requirements'].split(),
    extras_require={k.removesuffix(extra): v.split() for k,v in cfg.items() if k.endswith(extra)},
    packages=[*find_packages(include=['gpubench', 'gpubench.*']), labs],
    package_dir={labs: 'nbs/labs'}, include_package_data=False,
    package_data={'gpubench.show': ['page.*'],
                  labs: ['*.ipynb', '*.yaml', 'records/*', 'deeper/*']},
    entry_points=dict(console_scripts=cfg['console_scripts'].split()),
)
