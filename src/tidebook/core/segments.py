"""Assign heads and events to partitions of the store, which are called segments.

The number of head segments, and the number of events in a segment, are set when a topic is created.
"""

from __future__ import annotations

import zlib
from base64 import b85decode
from functools import cache
from typing import Final


def head_segment(id: str, segments: int) -> int:
    """Return the `metajournal` segment of a journal: abs(JavaHash(lower(id)) % segments), with the frozen `lower`."""
    h = 0
    units = lower(id).encode("utf-16-be")
    for i in range(0, len(units), 2):
        h = (31 * h + (units[i] << 8 | units[i + 1])) & 0xFFFFFFFF
    return abs(h - (1 << 32) if h >= 1 << 31 else h) % segments


def event_segment(seq_nr: int, segment_size: int) -> int:
    """Return the `journal` segment of an event, counted from 0."""
    return (seq_nr - 1) // segment_size


#: Unicode tables of Python 3.11, compressed. Their three lines are: code points with a lower case; Case_Ignorable ones,
#: which are skipped in the search for the letter next to a sigma; cased ones that are not ignorable. A line lists
#: ranges as `gap,count`; the gap is the distance from the start of the previous range. The first line adds
#: `,step,distance to the lower case`.
_PACKED: Final = """
    c-oCuNs{D94!id&^Z<pKlfM7|V*`M6g(|wNZ4MdfJ2w!dM!$XBc2~d5=j}Dd-tHNrR&GrEwyT%BYB2Am|EBXCH9leY#~iD9YH7)>V8!E9tdwz?Ms
    {f(EB*3Zsro;69`WMOsJ^aQUORj9teHJ)`#Il!_pCnW+oSNvmGvtJEA?M1KPK4J=w+t;%70w)`~F|%I~=^fgR}FN@!2!)emb4%B{oY&qZT|FFL>%
    u=I%f8J~kfLV%vX={n&G39FrzJ+2i58Qm2vELRYhKO^xcpOTyJmy+=#8K`=HFX}0d2n2TeJPsQ6FuKSGgtKEF8sS+ZqF`zaJ*c*5-
    UR{Nv<RCm6qn>V|g|TA&ZUOH-p*l7j^xvM7=}^9gi5idZa3UKh1Sc1!7)puDy{x-QxmwD)TED-Oic7Pn=(KVUV@9MNR@%*t&!RQs8LhvJ&hEUKvm
    Eua3pcF)yz4QF$b4oy9!Aiii#EptyvzLOf)#kX{Vtln0(BPsyYJ&GhER&5-
    40YftFD92&+_33Dm+2bk@v?{`^hk5iuerg+8TpCR0Q|<0d<+}dABanz}fIAEPXM}MPliDb-yNG{W$R-Dq}vRf0m-!OGb5O-
    pq5}3gDQGI$(a#t_?rX1ePtX{O~~Sl?jw7X+J5_+!u4=Nz>54%h|5w@EIo$acR<Dlk&%8z25Jy2YmT!G7jl(=b3dZiT$_S@{k$KS?%Gv<dbXUygu
    {=^~S4wHK3k0HH2!yS0l$8w?srjt@Rv^C~^CePFk81@kxfN%)7%KU~{<Z%&Il;X{GaP`-g16AnNgpQZL0w{F0L{JUD77Mxa;&9-
    X1M7z{$?@{Tw|P>UF`+_o-|Gg)+-
    $660bLr#1PH5Q$#N|WNjo`tI|7Sne?w}EPLb!<Hlx={gC`fGsbt~OPzz?pca?VI7X`q;8UDtZL<0P%!L>8%4T4me8|sXJ_sJ(>-
    Qhm?^DU1`#Dq+iE7@j|;*OJY0JND0)@<QhTyp#SPwcCQ}(t2ha>c+H+G_I`2(!T>66l~9ICylv5yStYpY{T-
    P;RlStdoNi7jcd!cJ(Vf2YRH@NtVdl&z){(I-
    6*9X_rk`+oN|DMopwZ*u&vl%>d2N)96T9)ZdUzy%#t?Sq6KcC2lmTBooD`=5NPI+rmA#m_+|rK2h}3l;ML0A;?KB@iUNu?{JHqNNVG;-
    ?NM|w}p;|r9dS(p3!OE%RfMRfCI=oWWJc^n80~u%}rr?C@g=PJO-3T-ruOH`H4+uo^=&!REkeVf4my77^N;0mM<w<aZ7x9pP-
    9O0*lLoX&>yd3}1}H<mAbK}F>Z>)q?0_fgo;2QD(LPe0(?zSOFX5Wq8$_0&r15yS9ePO+A-bOFwgRXiCX5vC&LH-
    {YB=5GaKU5Izlk+jy&p;uUOj!;B`DcyMX&T-f!}GeG-
    bD`MJZTZDPyd~6Ok?~*^<v(9b~#VZF1lGE1mK((dwctYEFZ+>tTJ7$7_&9gE`E@js&f;j6rElz-Hk1QlF%%x<v`SixZ0yUTo9Z7b-UrE0w-
    z$zNfdg4QVm-X?t3B_jkcAZka_D$+wf444Ocf~DAB9==hAE+U-fcqx$uK{j&h>W2-
    pDtMF5<xKg^nsG0Lq4ju@HSV%NR1r042+ga=i?{pAc*?rg(_VR@5~lDo;gYmyF{`W+k(~TwT;hiiwV+gdP+lulG%@;qDqE1rtWWww7Mou<5V-
    `+S~2p}Q0j}4i>fZWBwV)h?x=gprj+GDf{gq`HE)A3au}{EM+4X<;<Qqh2}F`z;H%DXbXc1>hgLP{fz&ZW0%Rk)$1eI&)LvH>BR(l#7#nRQeB-IP
    c2{VSq#HEA&+AtH8T=9#VUH*=0j(%YRTN+<bNn3JbOOY(2?Oyv8;6~t>WP+_Y1_ijg{+HSb&*BsQ|u3R5&W`Y#c#}NkTz!F++d5U?-
    ld~sQcn!sBBAs8L!>DwJ3kVxtM^9eL}yL5Lv7ZLoLO-9J=g+V=D6{pwOhYl7Kc1LAf$ivF>9%P1Rvek-
    GiyaFo&TH6~0@vCdKx$Nb^<LihMo04f0q765YX7Ke)v|8PjzD7OF-pvQ)m&G{nvGejfuX=^hZl^!*ix-O6w9k#-
    E=*hj*A$;uMuJwh0IX~S_Crj7imk7<Cud9Jg=>2=mCS9rw>C~F8Z`sCjFbdRI{aS+`^Yc{qs{blTer3m}RPHRpP5hRKUs0=i*7gWpMZaD7dEHf)^
    c%4K|Hts^qMeE>VcWqiLqH#2|LFIB><niF
"""

_SIGMA, _FINAL_SIGMA = "\u03a3", "\u03c2"


def lower(text: str) -> str:
    """Return what `str.lower` of Python 3.11 returns, on every Python: the segment of a head depends on it.

    Newer versions of Unicode give more letters a lower case. Without this table, processes with different versions of
    Python would look for the same head in different segments.

    >>> lower("ÄÖ-1")
    'äö-1'
    """
    if text.isascii():
        return text.lower()
    if _SIGMA in text:
        text = "".join(
            _FINAL_SIGMA if letter == _SIGMA and _ends_word(text, at) else letter for at, letter in enumerate(text)
        )
    return text.translate(_tables()[0])


def _ends_word(text: str, at: int) -> bool:
    """Return whether the letter at `at` follows a cased letter and precedes none; ignorable letters are skipped."""
    _, ignorable, cased = _tables()

    def is_cased(indexes: range) -> bool:
        return next((ord(text[i]) in cased for i in indexes if ord(text[i]) not in ignorable), False)

    return is_cased(range(at - 1, -1, -1)) and not is_cased(range(at + 1, len(text)))


@cache
def _tables() -> tuple[dict[int, int | str], frozenset[int], frozenset[int]]:
    """Return the lower case by code point, and the ignorable and the cased code points."""
    lower_case: dict[int, int | str] = {0x130: "i\u0307"}
    sets: list[set[int]] = []
    for line in zlib.decompress(b85decode("".join(_PACKED.split()))).decode().splitlines():
        sets.append(set())
        start = 0
        for item in line.split():
            gap, count, step, distance = (*map(int, item.split(",")), 1, 0)[:4]
            start += gap
            codes = range(start, start + count * step, step)
            sets[-1].update(codes)
            lower_case |= {code: code + distance for code in codes if distance}
    return lower_case, frozenset(sets[1]), frozenset(sets[2])
