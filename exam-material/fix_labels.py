import json,sys
S='/work/wt/exam/memcalib/data/starter/'
def rows(f):
    return [json.loads(l) for l in open(S+f,encoding='utf-8').read().split('\n') if l]
def dump(f,rs):
    open(S+f,'w',encoding='utf-8').write('\n'.join(json.dumps(r,ensure_ascii=False) for r in rs)+'\n')
raw=open(S+'pairs.jsonl',encoding='utf-8').read().split('\n'); print('pairs round trip',sum(json.dumps(json.loads(l),ensure_ascii=False)!=l for l in raw if l))
raw=open(S+'answers.jsonl',encoding='utf-8').read().split('\n'); print('answers round trip',sum(json.dumps(json.loads(l),ensure_ascii=False)!=l for l in raw if l))
A=rows('answers.jsonl'); P=rows('pairs.jsonl'); a={x['answer_id']:x for x in A}; p={x['pair_id']:x for x in P}
def da(i,atom):
    next(l for l in a[i]['labels'] if l['atom_id']==atom)['disputed']=True
def dp(i,atom):
    next(l for l in p[i]['labels'] if l['atom_id']==atom)['disputed']=True
for i,t in (('pair_009','p1_a2'),('pair_020','p1_a2'),('pair_056','p2_a1'),('pair_063','p1_a1'),('pair_070','p1_a2'),('pair_113','p1_a2'),('pair_078','p2_a1'),('pair_080','p1_a4'),('pair_090','p3_a1'),('pair_121','p2_a1'),('pair_121','p3_a1'),('pair_208','p4_a1')): dp(i,t)
for i,t in (('starter_coding_027_1','p1_a2'),('starter_coding_027_5','p1_a2'),('starter_general_016_1','p2_a1'),('starter_general_016_2','p2_a1'),('starter_general_016_4','p2_a1'),('starter_health_005_2','p1_a2'),('starter_health_005_3','p1_a2')): da(i,t)
next(l for l in p['pair_279']['labels'] if l['atom_id']=='p1_a1')['actual']='C'
def passage(i,old,new):
    x=p[i]; assert x['response'].count(old)==1,(i,old); x['response']=x['response'].replace(old,new); x['edit']['passage']=x['edit']['passage'].replace(old,new)
def repl(i,old,new):
    e=p[i]['edit']; assert e['replacement'].count(old)==1,(i,old); e['replacement']=e['replacement'].replace(old,new); e['to_quotes']=[q.replace(old,new) for q in e['to_quotes']]
passage('pair_104','**An old habit is the footbridge to a new one.** Whatever you do every morning carries something more, if you put it on at the same place','**An old habit is the bridge to a new one.** Whatever you do without thinking carries something more, if you put it on at the same place')
passage('pair_235','that sort of day gives attacks of sneezing to half the county, despite any daily spray from the chemist. Not dangerous, only less pleasant than trees.','that sort of day makes half the county sneeze. Not dangerous, only less pleasant than trees.')
repl('pair_112',"travel on the day before yesterday's date, and put","travel a day earlier, and put")
repl('pair_120',"That's not to be tightened on bad days: agree on it","That is how it stays: agree on it")
repl('pair_114',"**Under a tent of foil,** as you do it","**Outdoors, under a tent of foil,** as you do it")
repl('pair_058',"until he has had his say as well","until her father has had his say as well")
dump('answers.jsonl',A); dump('pairs.jsonl',P)
