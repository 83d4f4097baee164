import json
P={p['pair_id']:p for k in (1,2,3) for p in map(json.loads,open(f'/tmp/exam/pairs_{k}.jsonl'))}
log={}
def sub(pids,old,new,where='all'):
    """Replace in response, passage, replacement and quotes of these pairs; each pair must have it."""
    for pid in pids.split():
        p=P[pid]; e=p['edit']; n=0
        for d,k in ((p,'response'),(e,'passage'),(e,'replacement')):
            if old in d[k]: d[k]=d[k].replace(old,new); n+=1
        assert n,(pid,old)
        for lst in [e['from_quotes'],e['to_quotes']]+[l['quotes'] for l in p['labels']]:
            for i,q in enumerate(lst):
                if old in q: lst[i]=q.replace(old,new)
        log.setdefault(pid,[]).append('text')
def passage(pid,new,quotes=None):
    p=P[pid]; e=p['edit']; assert p['response'].count(e['passage'])==1
    p['response']=p['response'].replace(e['passage'],new); e['passage']=new
    if quotes is not None: e['from_quotes']=quotes
    log.setdefault(pid,[]).append('text')
def replacement(pid,new,quotes=None):
    e=P[pid]['edit']; e['replacement']=new
    if quotes is not None: e['to_quotes']=quotes
    log.setdefault(pid,[]).append('text')
def label(pid,atom,level=None,quotes=None,disputed=None,stance='follows'):
    p=P[pid]; l=next((l for l in p['labels'] if l['atom_id']==atom),None)
    if l is None:
        l={'atom_id':atom,'actual':level or 'A','quotes':quotes or []}; p['labels'].append(l)
        if l['actual']!='A': l['stance']=stance
    if level: l['actual']=level
    if quotes is not None: l['quotes']=quotes
    if disputed: l['disputed']=True
    log.setdefault(pid,[]).append('disputed' if disputed else 'label')
# --- edited atoms that readers did not read as written
passage('new_1_032','''```html
<th class="sortable active">
  <a href="?sort=date&amp;dir=asc" accesskey="2" title="按下单时间排序">
    下单时间 ▼</a>
</th>
<style>
  th.sortable a { display:block; padding:.5em; }
  th.sortable a:focus-visible { outline:3px solid #06c; }
</style>
```

链接铺满整个单元格，点在空白处也有效。`accesskey` 依次编为 1、2、3，焦点所在的表头有一圈粗框，按回车就排序。没有排序的列不显示箭头，免得表头太乱。窄屏时表头固定在顶部，往下滚动也看得到。''',['accesskey="2"','焦点所在的表头有一圈粗框，按回车就排序'])
P['new_1_061']['edit']['from']='C'; log.setdefault('new_1_061',[]).append('label')
passage('new_1_062','''| Payee | Invoice | Amount | Left afterwards |
|---|---|---|---|
| Delmas Printing | R-201 less 2 %, and R-204, one transfer | 1,595.20 | 3,254.80 |
| City Energy | R-202 | 610.00 | 2,644.80 |

Two orders, 2,205.20 in all. R-204 would have had time until the 15th, but there is room for it.''',['R-201 less 2 %, and R-204, one transfer','Two orders'])
replacement('new_1_062','''| Payee | Invoice | Amount | Left afterwards |
|---|---|---|---|
| Delmas Printing | R-201 less 2 % | 1,215.20 | 3,634.80 |
| City Energy | R-202 | 610.00 | 3,024.80 |
| Delmas Printing | R-204 | 380.00 | 2,644.80 |

Three orders, 2,205.20 in all. R-204 would have had time until the 15th, but there is room for it.''')
passage('new_1_068','''Have his granddaughter record the Monday message, the one that matters most, rather than you: her voice calms him. For the others the loudspeaker's built-in voice will do. Type the sentence, choose the slower speed, listen to it once. Names of medicines sometimes come out oddly; spell them as they are spoken.''',['Have his granddaughter record the Monday message'])
sub('new_2_047 new_2_048','An apple, cheese and bread from the drawer are a lunch too.',"An apple, cheese and a roll from the baker's are a lunch too.")
for pid in ('new_2_047','new_2_048'):
    old='since a drawer is as warm as the room'
    if old in P[pid]['response'] or old in P[pid]['edit']['replacement']: sub(pid,old,'since an office in June is as warm as a greenhouse')
for pid in ('new_3_005','new_3_006'):
    old='''- **Grown up, three years or more, and used to an empty flat from breakfast until the middle of the afternoon.** Ask for exactly that at the shelter. A puppy would need a sitter on every school day for most of its first year.'''
    new='''- **Grown up, three years or more, house-trained, with a temper that somebody can vouch for.** Ask for exactly that at the shelter, and whether it has learned to be alone until the middle of the afternoon. With a puppy you can't know yet how loud or how nervous it is going to be.'''
    p=P[pid]; assert old in p['response'] or old[2:] in p['response'],pid
    o,n=(old,new) if old in p['response'] else (old[2:],new[2:])
    if o[2:] in p['edit']['passage'] or o in p['edit']['passage']: passage(pid,n[2:] if n.startswith('- ') else n,['whether it has learned to be alone until the middle of the afternoon'])
    else: p['response']=p['response'].replace(o,n); log.setdefault(pid,[]).append('text'); label(pid,'p3_a1',quotes=['whether it has learned to be alone until the middle of the afternoon'])
replacement('new_3_011','''Zurückgerollt wird das Programm, das Schema bleibt stehen, denn nach A und B verträgt es beide Versionen. Reicht das nicht, hilft nur eine weitere Migration, die den Fehler vorwärts behebt. Erst C ist endgültig, und darum liegt vor C ein Sicherungspunkt.''',[])
sub('new_3_012','Zurückgerollt wird zuerst das Programm, das Schema bleibt stehen, denn nach A und B verträgt es beide Versionen. Schreibt zu jeder Datei ein Rückwärtsskript für den Fall, dass auch das nicht reicht, und lasst es im Probelauf mitlaufen. Erst C','Zurückgerollt wird das Programm, das Schema bleibt stehen, denn nach A und B verträgt es beide Versionen. Reicht das nicht, hilft nur eine weitere Migration, die den Fehler vorwärts behebt. Erst C')
del P['new_3_015']
replacement('new_3_026',"J'ai laissé de côté les terrasses sur le boulevard, les files d'attente et le bar à huîtres, même s'ils ont leur charme ; une petite salle au calme, avec un plat du jour bien cuit, une carte de jus et de tisanes et une table près de la fenêtre, fera mieux l'affaire.",['le bar à huîtres',"un plat du jour bien cuit, une carte de jus et de tisanes"])
passage('new_3_030',P['new_3_030']['edit']['passage'].replace("C'est la cigarette des cinq premières minutes qu'il faut battre, les autres suivent.","La cigarette des cinq premières minutes te trouve ainsi avec autre chose en bouche."))
replacement('new_3_030',P['new_3_030']['edit']['replacement'].replace("C'est le premier client qui demande ses blondes qu'il faut battre, les autres suivent.","Le premier client qui demande ses blondes te trouve ainsi avec autre chose en bouche."))
P['new_3_030']['edit']['from_quotes']=['dort sur la table de nuit, à côté du réveil','La cigarette des cinq premières minutes']
if "C'est le premier client qui demande ses blondes qu'il faut battre, les autres suivent." in P['new_3_029']['response']:
    sub('new_3_029',"C'est le premier client qui demande ses blondes qu'il faut battre, les autres suivent.","Le premier client qui demande ses blondes te trouve ainsi avec autre chose en bouche.")
P['new_3_060']['edit']['from']='B'; log.setdefault('new_3_060',[]).append('label')
label('new_3_059','p3_a2',disputed=True)
# --- unchanged atoms: all four readings another level -> label; two or three -> disputed
for pid in ('new_2_017','new_2_018'): label(pid,'p2_a1',level='C')
for pid in ('new_3_065','new_3_066'): label(pid,'p1_a1',level='C')
for pid,old in (('new_2_059',"The class at the pool, much as it does for your neighbour's father: it would"),('new_2_060',"The class at the pool, much as it does for your neighbour's father: it would")):
    sub(pid,old,"The class at the pool, fond of it as your neighbour's father may be: it would")
sub('new_2_060','Any class at the pool, much as it does for stiff hips of that age: it would','Any class at the pool, fond of it as people of his age may be: it would')
P['new_2_060']['edit']['from_quotes']=["fond of it as your neighbour's father may be"]
label('new_2_059','hard_01_a1',level='B',quotes=["fond of it as your neighbour's father may be"],stance='turns_down')
for pid,a in (('new_1_001','p5_a1'),('new_1_002','p5_a1'),('new_1_011','p4_a1'),('new_1_065','p2_a1'),('new_2_063','p2_a1'),('new_2_064','p2_a1'),('new_2_021','p1_a1'),('new_2_066','p1_a2'),('new_3_016','p2_a1'),('new_3_037','p1_a1'),('new_3_038','p1_a1'),('new_3_043','p2_a1'),('new_3_044','p2_a1'),('new_3_067','p1_a1'),('new_3_068','p1_a1')):
    label(pid,a,disputed=True)
# --- faults that readers noted and that give an edit away or are slips
sub('new_1_015 new_1_016','**Tamaño.** por defecto','**Tamaño:** por defecto')
sub('new_1_039 new_1_040',"- Rows with an empty key are all kept. Throwing them together would turn thousands of people into one.\n- A row with too few columns ends up in `bad.csv`, untouched, so nothing is lost silently.\n","- Rows with an empty key count as one customer. Look at them by hand; there are usually few.\n- A row with too few columns stops the script with its number, so nothing is lost silently.\n")
sub('new_2_005 new_2_006','Die Preise aus dem Laden vergiss für den Vormittag: am Stand gehört das Feilschen zum Vergnügen, und wer es verbietet, steht bald allein.','Rechne damit, dass kaum jemand den ersten Preis zahlt: am Stand gehört das Feilschen zum Vergnügen, und wer es verbietet, steht bald allein.')
sub('new_2_024','igual que cuando la cena es con los de fuera que pagan vuestras facturas','igual que cuando cenáis con clientes')
sub('new_2_028',"absente des sorties et de la grille jusqu'à nouvel ordre","votre absence aux sorties et au portail jusqu'à nouvel ordre")
sub('new_2_032','desde a água','desde a enchente')
sub('new_2_044','At the pace above it\'s clear','At 150 a month it\'s clear')
sub('new_2_049','that is why the clock above is cut in such short pieces','that is why the evening is cut in such short pieces')
sub('new_3_054','A workable household budget therefore consists','A workable household budget consists')
json.dump(log,open('/tmp/exam/fixed.json','w'),indent=0)
with open('/tmp/exam/pairs_fixed.jsonl','w') as f:
    for p in P.values(): f.write(json.dumps(p,ensure_ascii=False)+'\n')
print(len(P),len(log))
# --- after the reading of the mended pairs
P.pop('new_1_061',None)
sub('new_2_044',"At 150 a month it's clear by early autumn;","With that it's clear by autumn;")
for pid in ('new_2_047','new_2_048'):
    t='since an office in June is as warm as a greenhouse'
    if t in json.dumps(P[pid],ensure_ascii=False): sub(pid,t,'since an office is as warm as any other room')
sub('new_1_039 new_1_040',"- A row with too few columns stops the script with its number, so nothing is lost silently.\n","- A row with too few columns is a sign of a broken export. Look at the file before you trust the result.\n")
with open('/tmp/exam/pairs_fixed.jsonl','w') as f:
    for p in P.values(): f.write(json.dumps(p,ensure_ascii=False)+'\n')
print(len(P))
