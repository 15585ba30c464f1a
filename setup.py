"Package metadata, read from `settings.ini`, which is the one place where it is written"
from configparser import ConfigParser
from pathlib import Path
import shlex

from setuptools import find_packages, setup

here = Path(__file__).parent
parser = ConfigParser(delimiters=['='], interpolation=None)
parser.read(here/'settings.ini', encoding='utf-8')
cfg = parser['DEFAULT']


def words(key): return shlex.split(cfg.get(key, ''), comments=True)


# The labs live in nbs/labs and travel in the wheel as the data of a sub-package, so that `gpubench labs --copy` has them.
labs = 'gpubench.notebooks'
setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'],
    author=cfg['author'], author_email=cfg['author_email'], url=cfg['git_url'], license='Apache-2.0',
    classifiers=['Development Status :: 3 - Alpha', 'Intended Audience :: Education', 'Natural Language :: English']
        + [f'Programming Language :: Python :: {o}' for o in ('3.11', '3.12')],
    long_description=(here/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    packages=find_packages(include=['gpubench', 'gpubench.*']) + [labs],
    package_dir={labs: 'nbs/labs'}, package_data={'gpubench': ['page.*'], labs: ['*.ipynb', '*.yaml', 'records/*', 'deeper/*']},
    include_package_data=False,
    install_requires=words('requirements'), python_requires=f">={cfg['min_python']}",
    extras_require={'lab': words('lab_requirements'), 'int8': words('int8_requirements'), 'cluster': words('cluster_requirements'),
                    'site': words('site_requirements'),
                    'dev': words('dev_requirements') + words('lab_requirements') + words('int8_requirements')
                        + words('cluster_requirements') + words('site_requirements')},
    entry_points={'console_scripts': words('console_scripts'), 'nbdev': [f"{cfg['lib_name']}={cfg['lib_path']}._modidx:d"]},
    zip_safe=False)
